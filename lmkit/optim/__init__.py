"""AdamW, learning-rate schedules and gradient clipping."""
