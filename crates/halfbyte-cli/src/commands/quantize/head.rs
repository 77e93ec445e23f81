//! The output head, which is quantised by choice.

use super::Args;
use crate::failure::Result;
use halfbyte::{Float, WeightFormat, Zero};
use halfbyte_checkpoint::{Linear, Untied, Weights};
use halfbyte_llm::{Config, calibrate};

/// A head that becomes codes.
pub struct Head {
    /// Its module in the result.
    name: String,
    /// The embedding, where that is the head.
    embedding: Option<String>,
    shape: [usize; 2],
    /// What it becomes.
    pub format: WeightFormat,
}

impl Head {
    /// The head that the options ask for; None where it stays as it is. Error: an architecture that is not known, whose head is
    /// not known either.
    pub fn of(args: &Args, source: &Weights) -> Result<Option<Self>> {
        if args.head == 16 {
            return Ok(None);
        }
        let spec = Config::from_weights(source)?.spec;
        let shape = [spec.vocab, spec.hidden];
        let format = format(args.format(), args.head);
        Ok(Some(match spec.head {
            Some(name) => Self { name, embedding: None, shape, format },
            None => Self { name: Untied::HEAD.to_owned(), embedding: Some(spec.embedding), shape, format },
        }))
    }

    /// As a layer of the model that is written.
    pub fn linear(&self) -> Linear<'_> {
        Linear { name: &self.name, shape: self.shape, source: None }
    }

    /// The head of a model whose embedding is the head.
    pub fn untied(&self) -> Option<Untied<'_>> {
        self.embedding.as_deref().map(|embedding| Untied { embedding, format: self.format })
    }

    /// As calibration takes it.
    pub fn calibrated(&self) -> calibrate::Head<'_> {
        let source = self.embedding.as_ref().unwrap_or(&self.name);
        calibrate::Head { name: &self.name, source, format: self.format }
    }
}

/// The blocks' format with other bits. 8 bits have 256 codes, among which a zero point gains nothing, and other programs read
/// such heads without one.
fn format(blocks: WeightFormat, bits: u32) -> WeightFormat {
    match bits {
        _ if bits == blocks.bits => blocks,
        8 => WeightFormat { bits, zero: Zero::Symmetric, scale: Float::F16, channel_scale: None, ..blocks },
        _ => WeightFormat { bits, ..blocks },
    }
}
