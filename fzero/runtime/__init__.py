"""Running: functions built, programs executed, states born, ranks in agreement."""
