//! Random layers of a rank: drawn for it alone, but for codes that are cut otherwise than into one run of rows and columns, which are cut
//! from the whole.

use super::{Loader, Source, StoredLinear, StoredWeight};
use crate::arch::spec::{LinearSpec, Shape};
use crate::error::Result;
use crate::random::{self, RandomFloats};
use halfbyte::{Group, StoredTensor, WeightFormat};
use halfbyte_checkpoint::{Cut, FloatData};
use std::borrow::Cow;
use std::ops::Range;

impl<'a> Loader<'a> {
    /// Layers that read the same vector as one matrix of random floats, with their biases; `head`: they are the head. None: they come
    /// from a file, have codes, or are cut otherwise than into runs of rows.
    pub(crate) fn floats(
        &mut self,
        layers: &[(&LinearSpec, Cut)],
        head: bool,
    ) -> Option<(RandomFloats, Option<Vec<f32>>)> {
        let (Source::Random(random), [(first, _), ..]) = (self.source, layers) else { return None };
        let format = if head { random.head } else { random.format };
        let rows = |(layer, cut): &(&LinearSpec, Cut)| {
            let k = layer.shape.k;
            let (rows, columns) = single(cut)?;
            RandomFloats::of_rows(k, &layer.name, &rows).filter(|_| columns == (0..k))
        };
        if format.is_some() {
            return None;
        }
        let parts = layers.iter().map(rows).collect::<Option<Vec<_>>>()?;
        let bias = |(layer, cut): &(&LinearSpec, Cut)| match layer.shape.bias && cut.bias {
            true => bias(&layer.name, layer.shape.n)[cut.rows[0].clone()].to_vec(),
            false => vec![0.0; cut.rows[0].len()],
        };
        let biased = layers.iter().any(|(layer, cut)| layer.shape.bias && cut.bias);
        let biases = biased.then(|| layers.iter().flat_map(bias).collect());
        for ((layer, _), (n, _)) in layers.iter().zip(&parts) {
            self.parameters += *n as u64 * layer.shape.k as u64 + if layer.shape.bias { *n as u64 } else { 0 };
        }
        Some((RandomFloats { k: first.shape.k, parts }, biases))
    }

    /// A rank's part of a random layer.
    pub(super) fn drawn(
        &mut self,
        prefix: &str,
        shape: Shape,
        cut: &Cut,
        format: Option<WeightFormat>,
    ) -> Result<StoredLinear<'a>> {
        let (Shape { n, k, .. }, seed) = (shape, random::seed_of(prefix));
        let of_part = match (format, single(cut)) {
            (None, _) => {
                let floats = random::part_of_floats(k, prefix, &cut.rows, &cut.columns)?;
                StoredWeight::Dense { floats: FloatData::F16(Cow::Owned(floats)), shape: cut.shape() }
            }
            (Some(format), Some((rows, columns))) if whole_groups(format, &columns) => {
                StoredWeight::Quantized(StoredTensor::random_part(format, [n, k], seed, [rows, columns])?)
            }
            (Some(format), _) => {
                let weight = StoredWeight::Quantized(StoredTensor::random(format, [n, k], seed)?);
                let layer = StoredLinear { weight, bias: shape.bias.then(|| bias(prefix, n)), findings: Vec::new() };
                return self.part(layer, prefix, shape, cut);
            }
        };
        let of_rows = |bias: Vec<f32>| cut.rows.iter().flat_map(|rows| bias[rows.clone()].to_vec()).collect();
        let bias: Option<Vec<f32>> = (shape.bias && cut.bias).then(|| of_rows(bias(prefix, n)));
        let [rows, columns] = cut.shape();
        self.parameters += (rows * columns) as u64 + bias.as_ref().map_or(0, |bias| bias.len() as u64);
        Ok(StoredLinear { weight: of_part, bias, findings: Vec::new() })
    }
}

/// Whether a part that begins at some column begins with a group, and with whole words of codes.
fn whole_groups(format: WeightFormat, columns: &Range<usize>) -> bool {
    let in_group = |size| columns.start.is_multiple_of(size);
    in_group(32) && !matches!(format.group, Group::Size(size) if !in_group(size))
}

/// The rows and columns of a part, if they are one run each.
fn single(cut: &Cut) -> Option<(Range<usize>, Range<usize>)> {
    let ([rows], [columns]) = (&cut.rows[..], &cut.columns[..]) else { return None };
    Some((rows.clone(), columns.clone()))
}

/// A random bias.
fn bias(layer: &str, n: usize) -> Vec<f32> {
    random::vector(&format!("{layer}.bias"), n, 0.0, 0.05)
}
