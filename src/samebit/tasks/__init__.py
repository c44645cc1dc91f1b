"""Tasks: rows, prompts and verifiers. One file a task, found by its name (`api.load_task`)."""
