"""Trial runs of candidates and finished programs in a worker process."""
