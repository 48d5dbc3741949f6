"""The paper's letters: moments, bases and the linear algebra between them, as pure functions on tensors."""
