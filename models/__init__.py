"""Networks to work with: :mod:`optdnn.models.zoo` builds real architectures with seeded weights, :mod:`optdnn.models.trained` holds
small networks that were really trained, with their held-out data. Neither is imported before its first use.
"""
