//! Where the time of a model goes: each step of each layer, timed by itself.

use crate::decoder::Step;

/// Some tokens on their way through a model, step by step.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// The steps, in order.
    pub steps: Vec<TimedStep>,
    /// All of it, what lies between the steps included.
    pub seconds: f64,
}

impl Profile {
    /// Others that came behind.
    pub(crate) fn append(&mut self, Self { steps, seconds }: Self) {
        self.steps.extend(steps);
        self.seconds += seconds;
    }
}

/// A step that was timed: a part of a layer, or what is before and behind the layers.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedStep {
    /// What it is: `q k v`.
    pub name: &'static str,
    /// Its layer; None outside of the layers.
    pub layer: Option<usize>,
    /// Rows that go through it.
    pub rows: usize,
    /// What computes it.
    pub kernel: String,
    /// Bytes that it reads and writes, each once: weights, rows, keys and values.
    pub bytes: f64,
    /// Multiplications and additions of products, those of attention included.
    pub flop: f64,
    /// How long it takes.
    pub seconds: f64,
}

impl TimedStep {
    /// A step with the time that it took.
    pub(crate) fn new(step: Step, seconds: f64) -> Self {
        let Step { name, layer, rows, kernel, bytes, flop } = step;
        Self { name, layer, rows, kernel, bytes, flop, seconds }
    }
}
