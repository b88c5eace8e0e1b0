"""The Gradgate service: API, storage, dispatch and command line."""
