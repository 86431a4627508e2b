"""What a run's folder holds, sent on to an experiment tracker. The folder stays the truth."""
