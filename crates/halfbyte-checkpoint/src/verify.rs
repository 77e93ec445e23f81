//! Whether two checkpoints stand for the same numbers.

use crate::cut::Cut;
use crate::error::Result;
use crate::exact;
use crate::folder::Part;
use crate::gguf::{follow_from, is_frequencies};
use crate::safetensors::DType;
use crate::safetensors::FloatData;
use crate::scheme::{LinearWeight, ModuleKind, Weights};
use halfbyte::QTensor;
use rayon::prelude::*;
use serde::Serialize;
use std::borrow::Cow;
use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};

/// What [`verify`] found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
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
    /// Shapes that differ come first, then what is not a number.
    fn worst_first(&mut self) {
        let severity = |d: &Difference| (d.largest.is_none(), d.largest.unwrap_or(0.0));
        self.differing.sort_by(|a, b| {
            let (a, b) = (severity(a), severity(b));
            b.0.cmp(&a.0).then(b.1.total_cmp(&a.1))
        });
    }

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
    /// Types of its elements in both, where these are another and not both numbers that weights have.
    pub types: Option<[&'static str; 2]>,
    /// Elements that differ; all of them where shapes or types do.
    pub elements: u64,
    /// The largest difference, infinite where one is not a number; None where shapes or types differ.
    pub largest: Option<f64>,
    /// Where it is, row-major, and both values there.
    pub at: Option<(u64, f64, f64)>,
}

/// How far [`verify`] is.
pub type OnTensor<'a> = dyn FnMut(&str, usize, usize) -> bool + 'a;

/// Compares what two checkpoints stand for, number by number: quantised weights as the exact products and sums that they
/// mean, floats as they are. Zeros are equal whatever their sign; NaN equals NaN. A bias of zeros is as good as none, as are rotary
/// frequencies (`inv_freq`) that follow from the config of the checkpoint that does without them.
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
        only_in_first: missed(second, first, names.iter().filter(|name| !other.contains(name))),
        only_in_second: missed(first, second, others.iter().filter(|name| !known.contains(name))),
    };
    for (done, name) in common.iter().enumerate() {
        if !progress(name, done, common.len()) {
            return Err(crate::Error::Cancelled);
        }
        let (a, b) = (Numbers::of(first, name)?, Numbers::of(second, name)?);
        found.elements += a.len() as u64;
        found.differing.extend(difference(name, &a, &b, b.shape(), |i| i));
        drop((a, b));
        for weights in [first, second] {
            weights.checkpoint().release(name);
            weights.release(name.strip_suffix(WEIGHT).unwrap_or(name));
        }
    }
    found.worst_first();
    Ok(found)
}

/// Compares the parts of a model, in the order of their ranks, with the whole one: of each module what a rank's map of cuts names, of
/// everything else all; and whether the parts together have every row and column. Parts are named by their folders.
///
/// *Errors:* those of [`verify`].
pub fn verify_parts(
    parts: &[(&Weights, HashMap<String, Cut>)],
    whole: &Weights,
    progress: &mut OnTensor<'_>,
) -> Result<Verification> {
    let names = tensors(whole)?;
    let known: HashSet<&String> = names.iter().collect();
    let of_rank = |rank: usize, name: &str| format!("{}: {name}", Part::folder(rank));
    let mut found = Verification::default();
    for (rank, (part, _)) in parts.iter().enumerate() {
        let others = tensors(part)?.into_iter().filter(|name| !known.contains(name));
        found.only_in_first.extend(others.map(|name| of_rank(rank, &name)));
    }
    for (done, name) in names.iter().enumerate() {
        if !progress(name, done, names.len()) {
            return Err(crate::Error::Cancelled);
        }
        let b = Numbers::of(whole, name)?;
        let (bias, module) = (name.strip_suffix(".bias"), name.strip_suffix(WEIGHT));
        // Cuts are of matrices and vectors of numbers.
        let (n, k) = match (&b, &*b.shape()) {
            (Numbers::Bytes(..), _) => (1, 1),
            (_, &[n, k]) => (n, k),
            (_, &[n]) => (n, 1),
            _ => (1, 1),
        };
        let (mut rows, mut columns) = (vec![false; n], vec![false; k]);
        for (rank, (part, cuts)) in parts.iter().enumerate() {
            let cut = bias.or(module).and_then(|module| cuts.get(module)).filter(|_| n * k == b.len());
            if bias.is_some() && cut.is_some_and(|cut| !cut.bias) {
                continue;
            }
            let there = match module.map(|module| part.kind(module)).transpose()? {
                Some(kind) => !matches!(kind, ModuleKind::Absent),
                None => part.checkpoint().contains(name),
            };
            if !there {
                found.only_in_second.push(of_rank(rank, name));
                continue;
            }
            let a = Numbers::of(part, name)?;
            let own: [Vec<usize>; 2] = match cut {
                None => [(0..n).collect(), (0..k).collect()],
                Some(cut) if bias.is_some() => [cut.rows.iter().cloned().flatten().collect(), vec![0]],
                Some(cut) => [&cut.rows, &cut.columns].map(|ranges| ranges.iter().cloned().flatten().collect()),
            };
            let [own_rows, own_columns] = &own;
            let shape = match (cut, module) {
                (None, _) => b.shape(),
                (Some(_), None) => vec![own_rows.len()],
                (Some(_), Some(_)) => own.iter().map(Vec::len).collect(),
            };
            let width = own_columns.len().max(1);
            let other = |i: usize| if cut.is_none() { i } else { own_rows[i / width] * k + own_columns[i % width] };
            (found.compared, found.elements) = (found.compared + 1, found.elements + a.len() as u64);
            found.differing.extend(difference(&of_rank(rank, name), &a, &b, shape, other));
            own_rows.iter().for_each(|&i| rows[i] = true);
            own_columns.iter().for_each(|&j| columns[j] = true);
            drop(a);
            part.checkpoint().release(name);
            part.release(module.unwrap_or(name));
        }
        // A rank has whole rows or whole columns.
        if rows.iter().chain(&columns).any(|there| !there) {
            found.only_in_second.push(format!("rows or columns of {name}"));
        }
        drop(b);
        whole.checkpoint().release(name);
        whole.release(module.unwrap_or(name));
    }
    found.worst_first();
    Ok(found)
}

const WEIGHT: &str = ".weight";

/// Those of these tensors of `other` that a checkpoint misses: it does without frequencies that its config gives.
fn missed<'a>(checkpoint: &Weights, other: &Weights, names: impl Iterator<Item = &'a String>) -> Vec<String> {
    let config = LazyCell::new(|| checkpoint.model_config().ok());
    let follows = |name: &str| {
        let floats = is_frequencies(name).then(|| other.checkpoint().floats(name).ok()).flatten();
        floats.is_some_and(|floats| config.as_ref().is_some_and(|config| follow_from(config, floats.as_floats())))
    };
    names.filter(|name| !follows(name)).cloned().collect()
}

/// The tensors that a checkpoint stands for: those that a quantised module's weight is read from count as its dense `weight`.
fn tensors(weights: &Weights) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut parts = HashSet::new();
    for module in weights.modules() {
        if let ModuleKind::Quantized(scheme) = weights.kind(module)? {
            names.push(format!("{module}{WEIGHT}"));
            parts.extend(scheme.parts_of_weight().map(|part| format!("{module}.{part}")));
        }
    }
    for info in weights.checkpoint().tensors() {
        let is_no_bias = || info.name.ends_with(".bias") && is_zero(weights, info.name);
        if !parts.contains(info.name) && !is_no_bias() {
            names.push(info.name.to_owned());
        }
    }
    Ok(names)
}

/// Whether all elements of a tensor are zero, whatever their sign.
fn is_zero(weights: &Weights, name: &str) -> bool {
    let checkpoint = weights.checkpoint();
    let zero = match checkpoint.floats(name) {
        Ok(floats) => floats.to_f32().iter().all(|&v| v == 0.0),
        Err(_) => checkpoint.data(name).is_ok_and(|bytes| bytes.iter().all(|&byte| byte == 0)),
    };
    checkpoint.release(name);
    zero
}

/// The numbers of a tensor.
enum Numbers<'a> {
    Quantized(Box<QTensor>),
    Floats(FloatData<'a>, Vec<usize>),
    /// Of a type that holds no weights.
    Bytes(Cow<'a, [u8]>, Vec<usize>, DType),
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
            None => Numbers::Bytes(checkpoint.data(name)?, shape, info.dtype),
        })
    }

    /// What its elements are called, and whether these are numbers that weights have, whose types may differ.
    fn type_of(&self) -> (&'static str, bool) {
        match self {
            Numbers::Quantized(_) => ("codes", true),
            Numbers::Floats(floats, _) => (DType::from(floats.dtype()).name(), true),
            Numbers::Bytes(.., dtype) => (dtype.name(), false),
        }
    }

    fn shape(&self) -> Vec<usize> {
        match self {
            Numbers::Quantized(q) => vec![q.n(), q.k()],
            Numbers::Floats(_, shape) | Numbers::Bytes(_, shape, _) => shape.clone(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Numbers::Quantized(q) => q.codes().len(),
            Numbers::Floats(floats, _) => floats.len(),
            Numbers::Bytes(bytes, ..) => bytes.len(),
        }
    }

    /// Element `i`, exactly: the nearest f64, and what is left of it.
    fn get(&self, i: usize) -> [f64; 2] {
        match self {
            Numbers::Quantized(q) => exact::element(q, i),
            Numbers::Floats(floats, _) => [f64::from(floats.as_floats().get(i)), 0.0],
            Numbers::Bytes(bytes, ..) => [f64::from(bytes[i]), 0.0],
        }
    }
}

/// Elements that are compared at a time.
const PIECE: usize = 1 << 16;

/// Where a tensor, or its part, is another than the second checkpoint's, whose element that belongs to one of it `other` names.
fn difference(
    name: &str,
    a: &Numbers<'_>,
    b: &Numbers<'_>,
    shape: Vec<usize>,
    other: impl Fn(usize) -> usize + Sync,
) -> Option<Difference> {
    let (shapes, len) = ([a.shape(), shape], a.len());
    let [(of_a, a_is_number), (of_b, b_is_number)] = [a, b].map(Numbers::type_of);
    let types = (of_a != of_b && !(a_is_number && b_is_number)).then_some([of_a, of_b]);
    if shapes[0] != shapes[1] || types.is_some() {
        return Some(Difference {
            name: name.to_owned(),
            shapes,
            types,
            elements: len as u64,
            largest: None,
            at: None,
        });
    }
    let pieces: Vec<(u64, Option<(f64, usize)>)> = (0..len.div_ceil(PIECE))
        .into_par_iter()
        .map(|piece| {
            let (mut differing, mut worst) = (0, None::<(f64, usize)>);
            for i in piece * PIECE..len.min((piece + 1) * PIECE) {
                let (x, y) = (a.get(i), b.get(other(i)));
                if x == y || (x[0].is_nan() && y[0].is_nan()) {
                    continue;
                }
                differing += 1;
                let distance = (x[0] - y[0] + (x[1] - y[1])).abs();
                let distance = if distance.is_nan() { f64::INFINITY } else { distance };
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
        types,
        elements,
        largest: Some(largest),
        at: Some((i as u64, a.get(i)[0], b.get(other(i))[0])),
    })
}
