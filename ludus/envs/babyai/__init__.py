"""BabyAI."""
