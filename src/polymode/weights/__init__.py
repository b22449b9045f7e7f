"""What weights are drawn from and made of: priors, mixtures of components, late weights, masks."""
