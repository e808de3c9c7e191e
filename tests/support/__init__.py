"""What the tests share: small graph builders, and the checks that every pass has to hold."""
