//! Whether two checkpoints stand for the same numbers.

use crate::error::Result;
use crate::safetensors::FloatData;
use crate::scheme::{LinearWeight, ModuleKind, SCHEMES, Weights};
use halfbyte::{QTensor, Zeros};
use rayon::prelude::*;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::HashSet;

/// What [`verify`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verification {
    /// Tensors that were compared.
    pub compared: usize,
    /// Their elements.
    pub elements: u64,
    /// Tensors whose numbers differ, the worst first.
    pub differing: Vec<Difference>,
    /// Tensors of the first checkpoint that the second does not have.
    pub only_in_first: Vec<String>,
    /// Tensors of the second checkpoint that the first does not have.
    pub only_in_second: Vec<String>,
}

impl Verification {
    /// Whether both stand for the same numbers throughout.
    pub fn equal(&self) -> bool {
        self.differing.is_empty() && self.only_in_first.is_empty() && self.only_in_second.is_empty()
    }
}

/// A tensor that is not the same in both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Its name.
    pub name: String,
    /// Its dimensions in the first checkpoint and in the second.
    pub shapes: [Vec<usize>; 2],
    /// Elements that differ; all of them where the shapes do.
    pub elements: u64,
    /// The largest difference, infinite where one is not a number; None where the shapes differ.
    pub largest: Option<f64>,
    /// Where it is, row-major, and both values there.
    pub at: Option<(u64, f64, f64)>,
}

/// How far [`verify`] is.
pub type OnTensor<'a> = dyn FnMut(&str, usize, usize) -> bool + 'a;

/// Compares what two checkpoints stand for, number by number: quantised weights as the exact products and sums that they
/// mean, floats as they are. Zeros are equal whatever their sign; NaN equals NaN.
///
/// `progress` is told each tensor's name, its place and how many there are, and may end the comparison by returning
/// false, which is [`crate::Error::Cancelled`]. *Errors:* tensors that cannot be read.
pub fn verify(first: &Weights, second: &Weights, progress: &mut OnTensor<'_>) -> Result<Verification> {
    let (names, others) = (tensors(first)?, tensors(second)?);
    let known: HashSet<&String> = names.iter().collect();
    let other: HashSet<&String> = others.iter().collect();
    let common: Vec<&String> = names.iter().filter(|name| other.contains(name)).collect();
    let mut found = Verification {
        compared: common.len(),
        elements: 0,
        differing: Vec::new(),
        only_in_first: names.iter().filter(|name| !other.contains(name)).cloned().collect(),
        only_in_second: others.iter().filter(|name| !known.contains(name)).cloned().collect(),
    };
    for (done, name) in common.iter().enumerate() {
        if !progress(name, done, common.len()) {
            return Err(crate::Error::Cancelled);
        }
        let (a, b) = (Numbers::of(first, name)?, Numbers::of(second, name)?);
        found.elements += a.len() as u64;
        found.differing.extend(difference(name, &a, &b));
        drop((a, b));
        for weights in [first, second] {
            weights.checkpoint().release(name);
            weights.release(name.strip_suffix(WEIGHT).unwrap_or(name));
        }
    }
    // Shapes that differ come first, then what is not a number.
    let severity = |d: &Difference| (d.largest.is_none(), d.largest.unwrap_or(0.0));
    found.differing.sort_by(|a, b| {
        let (a, b) = (severity(a), severity(b));
        b.0.cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    Ok(found)
}

const WEIGHT: &str = ".weight";

/// The tensors that a checkpoint stands for: a quantised module's counts as its dense `weight`.
fn tensors(weights: &Weights) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut parts = HashSet::new();
    for module in weights.modules() {
        if let ModuleKind::Quantized(_) = weights.kind(module)? {
            names.push(format!("{module}{WEIGHT}"));
            parts.extend(SCHEMES.iter().flat_map(|s| s.parts).map(|part| format!("{module}.{part}")));
        }
    }
    let checkpoint = weights.checkpoint();
    for info in checkpoint.tensors() {
        // A bias of zeros is as good as none.
        let zero_bias =
            || info.name.ends_with(".bias") && checkpoint.data(info.name).is_ok_and(|b| b.iter().all(|&b| b == 0));
        if !parts.contains(info.name) && !zero_bias() {
            names.push(info.name.to_owned());
        }
    }
    Ok(names)
}

/// The numbers of a tensor.
enum Numbers<'a> {
    Quantized(Box<QTensor>),
    Floats(FloatData<'a>, Vec<usize>),
    /// Of a type that holds no weights.
    Bytes(Cow<'a, [u8]>, Vec<usize>),
}

impl<'a> Numbers<'a> {
    fn of(weights: &'a Weights, name: &str) -> Result<Self> {
        let checkpoint = weights.checkpoint();
        if let Some(module) = name.strip_suffix(WEIGHT)
            && let ModuleKind::Quantized(_) = weights.kind(module)?
        {
            return Ok(match weights.load_linear(module)?.weight {
                LinearWeight::Quantized(q) => Numbers::Quantized(Box::new(q)),
                LinearWeight::Dense { floats, shape } => Numbers::Floats(floats, shape.to_vec()),
            });
        }
        let info = checkpoint.info(name)?;
        let shape = info.shape.to_vec();
        Ok(match info.dtype.float() {
            Some(_) => Numbers::Floats(checkpoint.floats(name)?, shape),
            None => Numbers::Bytes(checkpoint.data(name)?, shape),
        })
    }

    fn shape(&self) -> Vec<usize> {
        match self {
            Numbers::Quantized(q) => vec![q.n(), q.k()],
            Numbers::Floats(_, shape) | Numbers::Bytes(_, shape) => shape.clone(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Numbers::Quantized(q) => q.codes().len(),
            Numbers::Floats(floats, _) => floats.len(),
            Numbers::Bytes(bytes, _) => bytes.len(),
        }
    }

    /// Element `i`, exactly: a product of a float and a code has 33 bits at most.
    fn get(&self, i: usize) -> f64 {
        match self {
            Numbers::Quantized(q) => {
                let (row, column) = (i / q.k(), i % q.k());
                let g = row * q.groups() + q.group_of(column);
                let (scale, code) = (f64::from(q.scales()[g]), f64::from(q.codes()[i]));
                match q.zeros() {
                    Zeros::Symmetric => scale * (code - f64::from(q.format().middle())),
                    Zeros::Integer(zeros) => scale * (code - f64::from(zeros[g])),
                    Zeros::Float(offsets) => scale * code + f64::from(offsets[g]),
                }
            }
            Numbers::Floats(floats, _) => f64::from(floats.as_floats().get(i)),
            Numbers::Bytes(bytes, _) => f64::from(bytes[i]),
        }
    }
}

/// Elements that are compared at a time.
const PIECE: usize = 1 << 16;

fn difference(name: &str, a: &Numbers<'_>, b: &Numbers<'_>) -> Option<Difference> {
    let shapes = [a.shape(), b.shape()];
    if shapes[0] != shapes[1] || a.len() != b.len() {
        let elements = a.len().max(b.len()) as u64;
        return Some(Difference { name: name.to_owned(), shapes, elements, largest: None, at: None });
    }
    let pieces: Vec<(u64, Option<(f64, usize)>)> = (0..a.len().div_ceil(PIECE))
        .into_par_iter()
        .map(|piece| {
            let (mut differing, mut worst) = (0, None::<(f64, usize)>);
            for i in piece * PIECE..a.len().min((piece + 1) * PIECE) {
                let (x, y) = (a.get(i), b.get(i));
                if x == y || (x.is_nan() && y.is_nan()) {
                    continue;
                }
                differing += 1;
                let distance = if (x - y).is_nan() { f64::INFINITY } else { (x - y).abs() };
                if worst.is_none_or(|(largest, _)| distance > largest) {
                    worst = Some((distance, i));
                }
            }
            (differing, worst)
        })
        .collect();
    let elements = pieces.iter().map(|(differing, _)| differing).sum();
    // The first of equal ones, whatever the threads.
    let worst = pieces.iter().filter_map(|(_, worst)| *worst).rev().max_by(|a, b| a.0.total_cmp(&b.0));
    worst.map(|(largest, i)| Difference {
        name: name.to_owned(),
        shapes,
        elements,
        largest: Some(largest),
        at: Some((i as u64, a.get(i), b.get(i))),
    })
}
