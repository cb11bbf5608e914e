"""Running a bound plan: its steps, their checks and their recovery, and plans made anew."""
