//! What the tensors of a checkpoint say by themselves, whatever the architecture: parts of modules that are left over, matrices of
//! types that are not read, blocks that lack what the others have, and numbers that no trained weight is.

use crate::checkpoint::{Container, TensorInfo};
use crate::config::in_block;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use crate::scheme::{LinearWeight, ModuleKind, SCHEMES, StoredWeight, Weights};
use halfbyte::{Float, Floats, QTensor};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Endings of tensors that stand for a module even where no other part of it is left.
const SURE: &[&str] = &["qweight", "qzeros", "weight_packed", "weight_scale", "weight_zero_point", "weight.absmax"];

/// Blocks from which on one that differs from all others is odd.
const FEW_BLOCKS: usize = 3;

impl Weights {
    /// What keeps the model from being read whole: modules of which parts are left without their codes, and matrices of linear
    /// layers in a type that is not read. [`crate::linears`] refuses it.
    pub fn unreadable(&self) -> Vec<Finding> {
        let mut parts: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut findings = Vec::new();
        for info in self.checkpoint().tensors() {
            let endings = SCHEMES.iter().flat_map(|scheme| scheme.parts).filter(|part| part.len() > 1);
            for part in endings.filter(|&&part| part != "weight") {
                if let Some(module) = info.name.strip_suffix(part).and_then(|rest| rest.strip_suffix('.')) {
                    parts.entry(module).or_default().insert(part);
                }
            }
            findings.extend(self.unread_matrix(&info));
        }
        for (module, parts) in parts {
            let sure = parts.iter().any(|part| SURE.contains(part));
            let of_one =
                |scheme: &crate::scheme::Scheme| scheme.parts.iter().filter(|part| parts.contains(*part)).count() > 1;
            if !(sure || SCHEMES.iter().any(of_one)) {
                continue;
            }
            let list = parts.iter().copied().collect::<Vec<_>>().join(", ");
            match self.kind(module) {
                Ok(ModuleKind::Absent) => {
                    let text = format!("has {list}, but no codes: the module is incomplete");
                    findings.push(Finding::new(module, text));
                }
                // A matrix in another type is told of above.
                Ok(ModuleKind::Dense) if self.is_float(module) => {
                    let text = format!("has {list} beside a weight of floats: a module is either quantised or dense");
                    findings.push(Finding::new(module, text));
                }
                _ => {}
            }
        }
        Finding::shortened(findings)
    }

    /// Tensors beside those of a quantised module that are named like parts of another scheme, and are not read. A conversion refuses
    /// them, and takes over those that say how activations are rounded.
    pub(crate) fn foreign_parts(&self) -> Vec<Finding> {
        let all: BTreeSet<&str> = SCHEMES.iter().flat_map(|scheme| scheme.parts).copied().collect();
        let mut foreign: BTreeMap<&str, (&str, Vec<&str>)> = BTreeMap::new();
        for name in self.checkpoint().tensor_names() {
            for part in &all {
                let module = name.strip_suffix(part).and_then(|rest| rest.strip_suffix('.'));
                if let Some(module) = module
                    && let Ok(ModuleKind::Quantized(scheme)) = self.kind(module)
                    && !scheme.parts.contains(part)
                {
                    foreign.entry(module).or_insert((scheme.name, Vec::new())).1.push(part);
                }
            }
        }
        let told = foreign.into_iter().map(|(module, (scheme, parts))| {
            let text = format!("has {}, which modules of {scheme} have not; not read", parts.join(", "));
            Finding::new(module, text)
        });
        Finding::shortened(told.collect())
    }

    fn is_float(&self, module: &str) -> bool {
        let info = self.checkpoint().get(&format!("{module}.weight"));
        info.is_some_and(|info| info.dtype.float().is_some())
    }

    /// A matrix in a block, or the head, in a type that no kernel and no scheme reads; of such blocks of codes any matrix.
    pub(crate) fn unread_matrix(&self, info: &TensorInfo<'_>) -> Option<Finding> {
        let module = info.name.strip_suffix(".weight").filter(|_| info.shape.len() == 2)?;
        let is_linear = in_block(module) || module == "lm_head" || matches!(info.dtype, DType::Block(_));
        let unread = is_linear && info.dtype.float().is_none() && matches!(self.kind(module), Ok(ModuleKind::Dense));
        unread.then(|| {
            let what = match info.dtype {
                DType::Block(block) => format!("blocks of {block}"),
                other => other.to_string(),
            };
            Finding::new(info.name, format!("is a matrix of {what}, which is not read; F16, BF16 and F32 are"))
        })
    }

    /// Blocks that lack modules which all the others have, and numbers that are left out: what tells of an incomplete model where
    /// its architecture is not known.
    pub fn irregular_blocks(&self) -> Vec<Finding> {
        // By what stands before the number.
        let mut series: HashMap<&str, Blocks<'_>> = HashMap::new();
        for module in self.modules() {
            let Some((before, number, behind)) = numbered(module) else { continue };
            let blocks = series.entry(before).or_default();
            blocks.all.insert(number);
            blocks.with.entry(behind).or_default().insert(number);
        }
        let mut findings = Vec::new();
        let mut series: Vec<_> = series.into_iter().filter(|(_, blocks)| blocks.all.len() >= FEW_BLOCKS).collect();
        series.sort_by_key(|(before, _)| *before);
        for (before, Blocks { all, with }) in series {
            let last = all.last().copied().unwrap_or(0);
            let gap = (0..=last).find(|number| !all.contains(number));
            findings.extend(gap.map(|number| {
                let text = format!("is not there, but others up to {last} are");
                Finding::new(format!("{before}{number}"), text)
            }));
            // A block with modules of its own is of another kind: the dense one before those with experts.
            let of_one: BTreeSet<usize> = with.values().filter(|blocks| blocks.len() == 1).flatten().copied().collect();
            for (behind, blocks) in with {
                if blocks.len() + 1 == all.len()
                    && let Some(number) = all.difference(&blocks).find(|number| !of_one.contains(number))
                {
                    let others = blocks.len();
                    let text = format!("has no `{behind}`, which the other {others} have");
                    findings.push(Finding::new(format!("{before}{number}"), text));
                }
            }
        }
        Finding::shortened(findings)
    }

    /// Looks at every number that is no code: NaN and infinity, and scales, norms and matrices that are zero throughout. `progress`
    /// is told of each tensor and of the bytes before it; it says whether to go on.
    ///
    /// Errors: [`Error::Cancelled`]; data that cannot be read.
    pub fn values(&self, mut progress: impl FnMut(&str, u64) -> bool) -> Result<Vec<Finding>> {
        let (mut findings, mut bytes) = (Vec::new(), 0);
        for info in self.checkpoint().tensors() {
            if !progress(info.name, bytes) {
                return Err(Error::Cancelled);
            }
            bytes += info.bytes as u64;
            findings.extend(self.value_of(&info)?);
            self.checkpoint().release(info.name);
        }
        Ok(Finding::shortened(findings))
    }

    /// Whether a tensor holds codes where floats have their place, whatever its type says: some forms store them as halfs.
    fn is_codes(&self, name: &str) -> bool {
        let module =
            name.strip_suffix(".weight").filter(|_| !matches!(self.checkpoint().container(), Container::Gguf(_)));
        module.is_some_and(|module| matches!(self.kind(module), Ok(ModuleKind::Quantized(_))))
    }

    fn value_of(&self, info: &TensorInfo<'_>) -> Result<Option<Finding>> {
        if self.is_codes(info.name) {
            return Ok(None);
        }
        if info.dtype.float().is_some() {
            return Ok(odd_values(info.name, self.checkpoint().floats(info.name)?.as_floats()));
        }
        // The scales of a block stand among its codes.
        let Some(module) = info.name.strip_suffix(".weight").filter(|_| matches!(info.dtype, DType::Block(_))) else {
            return Ok(None);
        };
        if !matches!(self.kind(module), Ok(ModuleKind::Quantized(_))) {
            return Ok(None);
        }
        match self.stored_linear(module)?.weight {
            StoredWeight::Quantized(w) => Ok(odd_values(info.name, w.scales().0.as_floats())),
            StoredWeight::Dense { .. } => Ok(None),
        }
    }
}

/// Blocks of one name but for their numbers.
#[derive(Default)]
struct Blocks<'a> {
    all: BTreeSet<usize>,
    /// Those that have a module, by what stands behind the number.
    with: BTreeMap<&'a str, BTreeSet<usize>>,
}

/// What stands before the first number of a name, the number, and what stands behind it.
fn numbered(module: &str) -> Option<(&str, usize, &str)> {
    let mut at = 0;
    for part in module.split('.') {
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            let behind = module.get(at + part.len() + 1..)?;
            return Some((&module[..at], part.parse().ok()?, behind));
        }
        at += part.len() + 1;
    }
    None
}

/// What was seen of a float tensor's numbers.
#[derive(Clone, Copy)]
struct Seen {
    nan: usize,
    infinite: usize,
    /// The first that is either.
    first: usize,
    /// Whether all are zero.
    zero: bool,
}

impl Seen {
    /// NaN and infinity, told.
    fn not_finite(&self, name: &str, len: usize) -> Option<Finding> {
        let kinds = [(self.nan, "NaN"), (self.infinite, "infinite")].into_iter().filter(|(count, _)| *count > 0);
        let kinds: Vec<_> = kinds.map(|(count, what)| format!("{count} are {what}")).collect();
        let text = format!("of {len} values {}, the first at {}", kinds.join(" and "), self.first);
        (!kinds.is_empty()).then(|| Finding::new(name, text))
    }
}

/// What is wrong with the numbers of a float tensor, if anything is. Biases, zero points and offsets may all be zero.
pub(crate) fn odd_values(name: &str, floats: Floats<'_>) -> Option<Finding> {
    let seen = seen(floats)?;
    let part = name.rsplit('.').next().unwrap_or_default();
    let may_be_zero = ["bias", "qzeros", "zero_points", "offsets", "scaled_zeros", "weight_zero_point"].contains(&part);
    let zero = || Finding::new(name, format!("all {} values are zero", floats.len()));
    seen.not_finite(name, floats.len()).or_else(|| (seen.zero && !may_be_zero).then(zero))
}

/// The least f16 that has all of its bits.
const LEAST_NORMAL: f32 = 6.103_515_6e-5;

/// Scales in f16 that are below its normal range though weights of their groups are not zero: such weights are held coarsely, or lost.
pub(crate) fn coarse_scales(name: &str, weight: &LinearWeight<'_>, q: &QTensor) -> Option<Finding> {
    let LinearWeight::Dense { floats, .. } = weight else { return None };
    let is_coarse = |scale: &f32| scale.abs() < LEAST_NORMAL;
    if q.format().scale != Float::F16 || !q.scales().iter().any(is_coarse) {
        return None;
    }
    let (floats, k, groups) = (floats.as_floats(), q.k(), q.groups());
    let mut used = vec![false; q.scales().len()];
    for i in 0..q.n() {
        for j in 0..k {
            used[i * groups + q.group_of(j)] |= floats.get(i * k + j) != 0.0;
        }
    }
    let coarse = q.scales().iter().zip(&used).filter(|(scale, used)| **used && is_coarse(scale));
    let (count, lost) = coarse.fold((0, 0), |(count, lost), (scale, _)| (count + 1, lost + usize::from(*scale == 0.0)));
    let all = q.scales().len();
    let text = format!("{count} of {all} scales are below 6.1e-5, where f16 has fewer bits, {lost} of them became 0");
    (count > 0).then(|| Finding::new(name, text))
}

/// NaN and infinity in a float tensor, if there are such.
pub(crate) fn not_finite(name: &str, floats: Floats<'_>) -> Option<Finding> {
    seen(floats)?.not_finite(name, floats.len())
}

/// None: there are no numbers.
fn seen(floats: Floats<'_>) -> Option<Seen> {
    const CHUNK: usize = 1 << 16;
    let len = floats.len();
    let chunk = |at: usize| {
        let begin = at * CHUNK;
        let mut seen = Seen { nan: 0, infinite: 0, first: usize::MAX, zero: true };
        for i in begin..len.min(begin + CHUNK) {
            let v = floats.get(i);
            seen.zero &= v == 0.0;
            if !v.is_finite() {
                seen.nan += usize::from(v.is_nan());
                seen.infinite += usize::from(v.is_infinite());
                seen.first = seen.first.min(i);
            }
        }
        seen
    };
    let join = |a: Seen, b: Seen| Seen {
        nan: a.nan + b.nan,
        infinite: a.infinite + b.infinite,
        first: a.first.min(b.first),
        zero: a.zero && b.zero,
    };
    (0..len.div_ceil(CHUNK)).into_par_iter().map(chunk).reduce_with(join)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_blocks_are_found_in_names() {
        assert_eq!(numbered("model.layers.12.mlp.up_proj"), Some(("model.layers.", 12, "mlp.up_proj")));
        assert_eq!(numbered("h.0.mlp.experts.3.w1"), Some(("h.", 0, "mlp.experts.3.w1")));
        assert_eq!(numbered("lm_head"), None);
        assert_eq!(numbered("layers.7"), None);
    }

    #[test]
    fn odd_values_are_counted_and_placed() {
        let mut values = vec![0.5f32; 200_000];
        assert_eq!(odd_values("a.weight", Floats::F32(&values)), None);
        (values[150_000], values[70_001]) = (f32::NAN, f32::NEG_INFINITY);
        let text = odd_values("a.weight", Floats::F32(&values)).unwrap().to_string();
        assert_eq!(text, "a.weight: of 200000 values 1 are NaN and 1 are infinite, the first at 70001");
        let zeros = vec![-0.0f32; 9];
        assert_eq!(odd_values("a.scales", Floats::F32(&zeros)).unwrap().text, "all 9 values are zero");
        assert_eq!(odd_values("a.bias", Floats::F32(&zeros)), None);
        assert_eq!(odd_values("a.weight", Floats::F32(&[])), None);
    }
}
