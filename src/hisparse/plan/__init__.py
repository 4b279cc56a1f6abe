"""What fits on a machine, from a model's configuration alone. `commands/plan.py` is the door."""
