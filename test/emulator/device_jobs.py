"""Jobs of emulated.py beside those of model_jobs.py; they ask the device for more than tokens."""
