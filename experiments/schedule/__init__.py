"""A calibrated schedule of budgets against a fixed budget of the same mean cost."""
