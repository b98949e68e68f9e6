"""Images by the million: what to read, processes that decode, shards of answers, a job that goes on after a kill."""
