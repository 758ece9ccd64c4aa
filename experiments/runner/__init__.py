"""One runner for all studies: a study is a table of arms, a run of one a process, what it came to a kept line."""
