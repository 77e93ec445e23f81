//! Quantising block by block: the same bits however often it is stopped, and the numbers that methods are given.

mod activations;
mod architectures;
mod case;
mod drift;
mod head;
mod numbers;
mod resume;
