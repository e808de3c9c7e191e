"""Several ranks of one network: what they exchange, how they find one another, how they are started and watched."""
