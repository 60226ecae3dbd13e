"""The logic of the scripts in scripts/."""
