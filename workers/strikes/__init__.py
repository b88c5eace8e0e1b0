"""How drills perturb a rank's step: real values, at the seams of the real step, and never a report.

Nothing here knows the judges: whatever a strike leaves behind is theirs to find. The names are in `workers.faults`.
"""
