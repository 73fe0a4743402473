"""Operations as they are dispatched, written down as nodes."""
