//! Reading a compressed-tensors module: shapes, labels and data are checked against each other before any code is
//! unpacked.

use super::super::{StoredModule, StoredWeight, Weights, matrix};
use super::labels::{self, Evidence, Label, Reach};
use super::packing::Packing;
use crate::checkpoint::Checkpoint;
use crate::config::{CompressedTensorsFormat, CompressedTensorsGroup, CompressedTensorsStrategy};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::{DType, cast};
use halfbyte::layout::codes::Codes;
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Group, WeightFormat, Zero};
use std::sync::Arc;

/// Where a module keeps its codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// In `weight_packed`.
    Packed,
    /// In `weight`, a signed byte each.
    Bytes,
}

impl Storage {
    fn format(self) -> CompressedTensorsFormat {
        match self {
            Storage::Packed => CompressedTensorsFormat::PackQuantized,
            Storage::Bytes => CompressedTensorsFormat::IntQuantized,
        }
    }
}

/// A module of which everything but codes and scales has been read.
pub(super) struct Module {
    pub n: usize,
    pub k: usize,
    pub format: WeightFormat,
    /// None: a byte each.
    packing: Option<Packing>,
    zeros: StoredZeros<'static>,
    /// Only if it says more than `j / group size`.
    pub group_index: Option<Vec<u32>>,
    pub findings: Vec<Finding>,
}

/// Reads all of a module but its codes and scales, which stay where they are.
pub(super) fn load<'a>(weights: &'a Weights, prefix: &str, storage: Storage) -> Result<StoredModule<'a>> {
    let Module { n, k, format, packing, zeros, group_index, findings } = examine(weights, prefix, storage)?;
    let checkpoint = weights.checkpoint();
    let codes = match packing {
        Some(packing) => {
            let words = checkpoint.words(&format!("{prefix}.weight_packed"))?;
            if matches!(packing.bits, 2 | 4 | 8) {
                Codes::WordsAlong(words)
            } else {
                Codes::Rows(Arc::new(move |rows, codes| packing.unpack(&words, k, rows, codes)))
            }
        }
        None => Codes::Bytes { codes: checkpoint.data(&format!("{prefix}.weight"))?, flip: 0x80 },
    };
    let strides =
        if format.group == Group::Tensor { Strides::TENSOR } else { Strides::of_outputs(format.group.count(k)) };
    let scales = (checkpoint.floats(&format!("{prefix}.weight_scale"))?, strides);
    let tensor =
        StoredTensor::new(format, [n, k], codes, scales, zeros, group_index).map_err(Error::numbers(prefix))?;
    Ok(StoredModule { weight: StoredWeight::Quantized(tensor), findings })
}

/// Reads a module's shapes, zero points and group index.
pub(super) fn examine(weights: &Weights, prefix: &str, storage: Storage) -> Result<Module> {
    let checkpoint = weights.checkpoint();
    let mut parts = Parts { checkpoint, prefix, n: 0, k: 0, findings: Vec::new() };
    let told = match storage {
        Storage::Packed => parts.packings()?,
        Storage::Bytes => {
            [parts.n, parts.k] = matrix(checkpoint, &parts.name("weight"), DType::I8)?;
            parts.not_empty("weight")?;
            Vec::new()
        }
    };
    let reach = parts.reach()?;
    let widths: Vec<u32> =
        if storage == Storage::Bytes { vec![8] } else { told.iter().map(|packing| packing.bits).collect() };
    let zero_points = checkpoint.contains(&parts.name("weight_zero_point"));
    let evidence = Evidence { bits: &widths, reach, k: parts.k, zero_points, format: storage.format() };
    let config = labels::declared(weights);
    let label = config.and_then(|config| labels::group_of(config, prefix, &evidence));
    let label = match label {
        Some(Label { group, joined: Some(name) }) => {
            let text = format!("the config's {} targets `{name}`, which it is joined in; taken for it too", group.name);
            parts.find(text);
            Some(group)
        }
        other => other.map(|label| label.group),
    };

    let bits = parts.bits(label, &widths, storage)?;
    let packing = match storage {
        Storage::Packed => Some(parts.packing(told.into_iter().filter(|packing| packing.bits == bits).collect())?),
        Storage::Bytes => None,
    };
    let group = parts.group(label.map(|l| l.strategy), reach)?;
    let zeros = parts.zeros(packing, bits, group, label)?;
    let group_index = parts.group_index(label, group)?;
    if let Some(format) = label.and_then(|l| l.format).filter(|&format| format != storage.format()) {
        let (says, is) = (format.name(), storage.format().name());
        parts.find(format!("the config says {says}, but its tensors are those of {is}; read as {is}"));
    }
    let scales = checkpoint.info(&parts.name("weight_scale"))?;
    let scale = scales.dtype.float().ok_or_else(|| {
        let what = format!("tensor `{}`: expected F16, BF16 or F32, got {}", scales.name, scales.dtype);
        Error::malformed(scales.file, what)
    })?;
    let zero = if matches!(zeros, StoredZeros::Symmetric) { Zero::Symmetric } else { Zero::Integer };
    let Parts { n, k, findings, .. } = parts;
    let format = WeightFormat { bits, group, zero, scale, channel_scale: None };
    Ok(Module { n, k, format, packing, zeros, group_index, findings })
}

/// A module's tensors, with what has been found out so far.
struct Parts<'a> {
    checkpoint: &'a Checkpoint,
    prefix: &'a str,
    n: usize,
    k: usize,
    findings: Vec<Finding>,
}

impl<'a> Parts<'a> {
    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }

    fn find(&mut self, text: String) {
        self.findings.push(Finding::new(self.prefix, text));
    }

    /// The error that a tensor is not as expected.
    fn unexpected<T>(&self, part: &str, expected: &str) -> Result<T> {
        self.checkpoint.unexpected(&self.name(part), expected)
    }

    fn not_empty(&self, part: &str) -> Result<()> {
        if self.n == 0 || self.k == 0 { self.unexpected(part, "neither dimension 0") } else { Ok(()) }
    }

    /// Reads `weight_shape`, and finds the packings that the shape of `weight_packed` allows.
    fn packings(&mut self) -> Result<Vec<Packing>> {
        let [rows, words] = matrix(self.checkpoint, &self.name("weight_packed"), DType::I32)?;
        let name = self.name("weight_shape");
        let info = self.checkpoint.info(&name)?;
        let bytes = self.checkpoint.data(&name)?;
        let shape: Option<Vec<usize>> = match info.dtype {
            DType::I64 => cast::<i64>(bytes).iter().map(|&d| usize::try_from(d).ok()).collect(),
            DType::I32 => cast::<i32>(bytes).iter().map(|&d| usize::try_from(d).ok()).collect(),
            _ => None,
        };
        let Some(&[n, k]) = shape.as_deref() else {
            return self.unexpected("weight_shape", "I64 [2] with outputs and inputs, neither negative");
        };
        if n != rows {
            let what = format!("tensor `{name}`: expected {rows} outputs as `weight_packed` has rows, got [{n}, {k}]");
            return Err(Error::malformed(info.file, what));
        }
        [self.n, self.k] = [n, k];
        self.not_empty("weight_packed")?;
        // More inputs than words have bits fit no width; this keeps what follows from overflowing.
        let told = if k / 32 > words { Vec::new() } else { Packing::fitting(k, words) };
        if told.is_empty() {
            let expected = format!("[{n}, ceil({k}·bits / 32)] for the {k} inputs of `weight_shape` and 1 to 8 bits");
            return self.unexpected("weight_packed", &expected);
        }
        Ok(told)
    }

    fn reach(&self) -> Result<Reach> {
        let scales = self.checkpoint.info(&self.name("weight_scale"))?;
        match *scales.shape {
            [] | [1] => Ok(Reach::Tensor),
            [1, 1] if self.n > 1 => Ok(Reach::Tensor),
            [rows, groups] if rows == self.n && groups > 0 => Ok(Reach::Rows(groups)),
            _ => {
                let n = self.n;
                let expected = format!(
                    "[{n}, groups], [{n}, 1] or [1] (the strategies group, channel and tensor; block is not read)"
                );
                self.unexpected("weight_scale", &expected)
            }
        }
    }

    /// The width of the codes, out of those that the data allows.
    fn bits(&mut self, label: Option<&CompressedTensorsGroup>, widths: &[u32], storage: Storage) -> Result<u32> {
        const READ: [u32; 4] = [2, 3, 4, 8];
        let bits = match label {
            Some(label) if widths.contains(&label.bits) => label.bits,
            _ => {
                let mut readable: Vec<u32> = widths.iter().copied().filter(|bits| READ.contains(bits)).collect();
                readable.dedup();
                let bits = match *readable.as_slice() {
                    [] => widths[0],
                    [bits] => bits,
                    _ => {
                        let what =
                            format!("another number of inputs or a config: codes of {readable:?} bits would fit");
                        return self.unexpected("weight_packed", &what);
                    }
                };
                if let Some(label) = label {
                    let (says, holds) = (label.bits, storage_of(storage));
                    self.find(format!("the config says {says} bits, but `{holds}` holds {bits}; read as {bits} bits"));
                }
                bits
            }
        };
        if !READ.contains(&bits) {
            let info = self.checkpoint.info(&self.name(storage_of(storage)))?;
            let what =
                format!("tensor `{}`: codes of {bits} bits are not read; widths that are: 2, 3, 4, 8", info.name);
            return Err(Error::unsupported(info.file, what));
        }
        Ok(bits)
    }

    /// The packing of the codes, out of one or both of their width.
    fn packing(&mut self, fitting: Vec<Packing>) -> Result<Packing> {
        let &[dense, whole] = fitting.as_slice() else { return Ok(fitting[0]) };
        let words = self.checkpoint.ints(&self.name("weight_packed"))?;
        let taken = match [dense, whole].map(|packing| packing.spare_bits_are_zero(&words, self.k)) {
            [true, _] => dense,
            [false, true] => whole,
            [false, false] => {
                return self.unexpected("weight_packed", "0 in the bits that hold no code, in either packing");
            }
        };
        let reading = if taken.is_whole() { "with whole codes in each word" } else { "as a dense stream" };
        self.find(format!("the shape of `weight_packed` allows two packings; by its spare bits it was read {reading}"));
        Ok(taken)
    }

    /// How far one scale reaches: as declared where the scales are so shaped, or else as their shape says.
    fn group(&mut self, strategy: Option<CompressedTensorsStrategy>, reach: Reach) -> Result<Group> {
        let k = self.k;
        if let Some(strategy) = strategy.filter(|&strategy| reach.fits(strategy, k)) {
            return Ok(match strategy {
                CompressedTensorsStrategy::Tensor => Group::Tensor,
                CompressedTensorsStrategy::Channel => Group::Channel,
                CompressedTensorsStrategy::Group(size) => Group::Size(size),
            });
        }
        let Some(group) = reach.group(k) else {
            let says = strategy.map_or("no config gives the group size".to_owned(), |s| format!("the config says {s}"));
            let expected = format!("a number of groups that divides the {k} inputs ({says})");
            return self.unexpected("weight_scale", &expected);
        };
        if let Some(strategy) = strategy {
            let taken = match group {
                Group::Tensor => CompressedTensorsStrategy::Tensor,
                Group::Channel => CompressedTensorsStrategy::Channel,
                Group::Size(size) => CompressedTensorsStrategy::Group(size),
            };
            self.find(format!("the config says {strategy}, but `weight_scale` has {taken}; read as {taken}"));
        }
        Ok(group)
    }

    /// The zero points, `[n, groups]`.
    fn zeros(
        &mut self,
        packing: Option<Packing>,
        bits: u32,
        group: Group,
        label: Option<&CompressedTensorsGroup>,
    ) -> Result<StoredZeros<'static>> {
        const PART: &str = "weight_zero_point";
        let (n, groups, middle) = (self.n, group.count(self.k), 1i16 << (bits - 1));
        let name = self.name(PART);
        let Some(info) = self.checkpoint.get(&name) else {
            if label.is_some_and(|label| !label.symmetric) {
                let text = "the config says that zero points are not symmetric, but there are none; read as symmetric";
                self.find(text.into());
            }
            return Ok(StoredZeros::Symmetric);
        };
        let scales = self.checkpoint.info(&self.name("weight_scale"))?;
        let zeros: Vec<u16> = match (info.dtype, info.shape, packing) {
            (DType::I8, shape, _) if shape == scales.shape => {
                let signed = cast::<i8>(self.checkpoint.data(&name)?);
                if let Some(zero) = signed.iter().find(|&&z| !(-middle..middle).contains(&i16::from(z))) {
                    let what =
                        format!("tensor `{name}`: expected zero points from {} to {}, got {zero}", -middle, middle - 1);
                    return Err(Error::malformed(info.file, what));
                }
                let repeats = if group == Group::Tensor { n } else { 1 };
                signed.iter().flat_map(|&z| std::iter::repeat_n((i16::from(z) + middle) as u16, repeats)).collect()
            }
            (DType::I32, &[words, columns], Some(packing)) if group != Group::Tensor && columns == groups => {
                // Packed as the codes are, if that fits.
                let packings = [packing, Packing::dense(bits), Packing::whole(bits)];
                let Some(packing) = packings.into_iter().find(|packing| packing.words_of(n) == words) else {
                    return self.unexpected(PART, &format!("I32 [ceil({n}·{bits} / 32), {groups}]"));
                };
                let stored = packing.unpack_columns(&self.checkpoint.ints(&name)?, [n, groups]);
                stored.into_iter().map(u16::from).collect()
            }
            _ => {
                let packed = match packing {
                    Some(_) if group != Group::Tensor => format!("I32 [ceil({n}·{bits} / 32), {groups}] or "),
                    _ => String::new(),
                };
                return self.unexpected(PART, &format!("{packed}I8 {:?}", scales.shape));
            }
        };
        if zeros.iter().all(|&z| z == middle as u16) {
            return Ok(StoredZeros::Symmetric);
        }
        if label.is_some_and(|label| label.symmetric) {
            let text = "the config says that zero points are symmetric, but others are stored; they were followed";
            self.find(text.into());
        }
        Ok(StoredZeros::Integer(zeros.into(), Strides::of_outputs(groups)))
    }

    /// The group of each column, if that is not simply `j / group size`.
    fn group_index(&mut self, label: Option<&CompressedTensorsGroup>, group: Group) -> Result<Option<Vec<u32>>> {
        let (k, groups) = (self.k, group.count(self.k));
        let act_order = label.is_some_and(|label| label.act_order) && groups > 1;
        let name = self.name("weight_g_idx");
        let Some(info) = self.checkpoint.get(&name) else {
            if act_order {
                let what = format!(
                    "there is no tensor `{name}`, but the config says actorder `group`: the order of columns is unknown"
                );
                return Err(Error::missing(self.checkpoint.path(), what));
            }
            return Ok(None);
        };
        if info.shape != [k] {
            return self.unexpected("weight_g_idx", &format!("I32 [{k}]"));
        }
        let index = self.checkpoint.ints(&name)?;
        if index.iter().all(|&g| g == -1) {
            if act_order {
                return self
                    .unexpected("weight_g_idx", "groups, as the config says actorder `group`, not -1 throughout");
            }
            return Ok(None);
        }
        if let Some((j, g)) = index.iter().enumerate().find(|&(_, &g)| g < 0 || g as usize >= groups) {
            let what = format!("tensor `{name}`: expected groups from 0 to {}, got {g} at {j}", groups - 1);
            return Err(Error::malformed(info.file, what));
        }
        let size = group.len(k).max(1);
        if index.iter().enumerate().all(|(j, &g)| g as usize == j / size) {
            return Ok(None);
        }
        if label.is_some_and(|label| !label.act_order) {
            let text =
                "the config does not say actorder `group`, but weight_g_idx reorders the columns; it was followed";
            self.find(text.into());
        }
        Ok(Some(index.iter().map(|&g| g as u32).collect()))
    }
}

fn storage_of(storage: Storage) -> &'static str {
    match storage {
        Storage::Packed => "weight_packed",
        Storage::Bytes => "weight",
    }
}
