"""The displays of a run while it works: notices of slow work, and a display that updates in place."""
