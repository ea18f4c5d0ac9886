"""What a schedule would take, exactly, and pictures and traces of it and of runs. No torch."""
