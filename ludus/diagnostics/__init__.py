"""Doctor, plan and profile."""
