"""Several ranks of one network: their exchanges, how they find one another, how they are started and watched."""
