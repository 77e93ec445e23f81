//! Reading a GPTQ module: shapes, labels and data are checked against each other before any code is unpacked.

use super::super::{Hint, StoredModule, StoredWeight, Weights, matrix};
use super::{infer, labels, stream};
use crate::checkpoint::Checkpoint;
use crate::config::{GptqConfig, GptqSettings, GptqVersion};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use halfbyte::layout::codes::Codes;
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Group, WeightFormat, Zero};
use std::sync::Arc;

/// A module of which everything but codes and scales has been read.
pub(super) struct Module {
    pub n: usize,
    pub k: usize,
    pub format: WeightFormat,
    zeros: StoredZeros<'static>,
    /// Only if it says more than `j / group size`.
    pub group_index: Option<Vec<u32>>,
    pub findings: Vec<Finding>,
}

/// Reads a module's shapes, zero points and group index.
pub(super) fn examine(weights: &Weights, prefix: &str) -> Result<Module> {
    let parts = Parts::of(weights, prefix)?;
    let mut findings = Vec::new();
    let group_index = parts.group_index()?;
    let group = parts.group(group_index.as_deref())?;
    parts.own_settings(group, &mut findings);
    let group_index = parts.meaningful(group_index, group, &mut findings)?;
    let zeros = parts.zeros(&mut findings)?;
    let zero = if matches!(zeros, StoredZeros::Symmetric) { Zero::Symmetric } else { Zero::Integer };
    let scales = parts.checkpoint.info(&parts.name("scales"))?;
    let scale = scales.dtype.float().ok_or_else(|| {
        Error::malformed(
            scales.file,
            format!("tensor `{}`: expected F16, BF16 or F32, got {}", scales.name, scales.dtype),
        )
    })?;
    let format = WeightFormat { bits: parts.bits, group, zero, scale, channel_scale: None };
    Ok(Module { n: parts.n, k: parts.k, format, zeros, group_index, findings })
}

/// Reads all of a module but its codes and scales, which stay where they are.
pub(super) fn load<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    let Module { n, k, format, zeros, group_index, findings } = examine(weights, prefix)?;
    let checkpoint = weights.checkpoint();
    let words = checkpoint.words(&format!("{prefix}.qweight"))?;
    let codes = match format.bits {
        // Some codes lie in two words.
        3 => Codes::Rows(Arc::new(move |outputs, codes| stream::unpack_columns(&words, 3, [n, k], outputs, codes))),
        _ => Codes::WordsDown(words),
    };
    let scales = (checkpoint.floats(&format!("{prefix}.scales"))?, Strides::of_groups(n));
    let tensor =
        StoredTensor::new(format, [n, k], codes, scales, zeros, group_index).map_err(Error::numbers(prefix))?;
    Ok(StoredModule { weight: StoredWeight::Quantized(tensor), findings })
}

/// The shapes of a module's tensors, found consistent.
struct Parts<'a> {
    checkpoint: &'a Checkpoint,
    config: Option<&'a GptqConfig>,
    /// What the config has for this module.
    settings: Option<GptqSettings>,
    /// What the caller says where shapes do not.
    hint: Hint,
    prefix: &'a str,
    n: usize,
    k: usize,
    groups: usize,
    bits: u32,
}

impl<'a> Parts<'a> {
    fn of(weights: &'a Weights, prefix: &'a str) -> Result<Self> {
        let checkpoint = weights.checkpoint();
        let config = labels::declared(weights);
        let settings = config.map(|config| config.settings_of(prefix));
        let name = |part: &str| format!("{prefix}.{part}");
        let [rows, n] = matrix(checkpoint, &name("qweight"), DType::I32)?;
        let file = checkpoint.info(&name("qweight"))?.file;
        let scales = checkpoint.info(&name("scales"))?;
        let groups = match *scales.shape {
            [groups, columns] if columns == n && groups > 0 && n > 0 && rows > 0 => groups,
            ref shape => {
                let what = format!(
                    "tensor `{}`: expected [groups, {n}], none of them 0, beside a qweight of [{rows}, {n}], got {shape:?}; \
                     is this GPTQ?",
                    scales.name
                );
                return Err(Error::malformed(scales.file, what));
            }
        };
        // The config's bits, unless modules may have their own: then the shape of the zero points tells.
        let declared = settings.filter(|settings| settings.of_all).map(|settings| settings.bits);
        let bits = if checkpoint.contains(&name("qzeros")) {
            let [zero_rows, zero_columns] = matrix(checkpoint, &name("qzeros"), DType::I32)?;
            let told = infer::bits(zero_columns, n);
            let bits = declared.or(told);
            match bits {
                Some(bits) if told == Some(bits) && zero_rows == groups => bits,
                _ => {
                    let bits = bits.map_or("bits".to_owned(), |b| b.to_string());
                    let what = format!(
                        "tensor `{}`: expected [{groups}, {n}·{bits}/32] (groups and outputs of the scales; outputs × bits \
                         a multiple of 32), got [{zero_rows}, {zero_columns}]",
                        name("qzeros")
                    );
                    return Err(Error::malformed(checkpoint.info(&name("qzeros"))?.file, what));
                }
            }
        } else if checkpoint.contains(&name("zeros")) {
            let what = format!(
                "module `{prefix}`: it has float zero points, `zeros`, as the first form of GPTQ-for-LLaMa did, which is not read"
            );
            return Err(Error::unsupported(file, what));
        } else if let Some(settings) = settings.filter(|settings| settings.sym == Some(true)) {
            settings.bits
        } else {
            let what =
                format!("there is no tensor `{}`, and no config says that zero points are symmetric", name("qzeros"));
            return Err(Error::missing(file, what));
        };
        let Some(k) = infer::inputs(rows, bits) else {
            let what =
                format!("tensor `{}`: {rows} rows of 32 bits do not hold whole codes of {bits} bits", name("qweight"));
            return Err(Error::malformed(file, what));
        };
        Ok(Self { checkpoint, config, settings, hint: weights.hint(), prefix, n, k, groups, bits })
    }

    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }

    /// The group index as it is stored, every entry found in range.
    fn group_index(&self) -> Result<Option<Vec<u32>>> {
        let name = self.name("g_idx");
        let Some(info) = self.checkpoint.get(&name) else { return Ok(None) };
        if info.shape != [self.k] {
            let what =
                format!("tensor `{name}`: expected shape [{}] (inputs of qweight), got {:?}", self.k, info.shape);
            return Err(Error::malformed(info.file, what));
        }
        let index = self.checkpoint.ints(&name)?;
        if let Some((j, g)) = index.iter().enumerate().find(|&(_, &g)| g < 0 || g as usize >= self.groups) {
            let what = format!("tensor `{name}`: expected groups from 0 to {}, got {g} at {j}", self.groups - 1);
            return Err(Error::malformed(info.file, what));
        }
        Ok(Some(index.iter().map(|&g| g as u32).collect()))
    }

    /// The group size: as declared, or told by the data where nothing is declared for this module alone.
    fn group(&self, index: Option<&[u32]>) -> Result<Group> {
        let &Self { k, groups, settings, .. } = self;
        let fail = |expected: String| {
            let info = self.checkpoint.info(&self.name("scales"))?;
            let what = format!("tensor `{}`: expected {expected}, got {:?}", info.name, info.shape);
            Err(Error::malformed(info.file, what))
        };
        if let Some(settings) = settings
            && let Some(declared) = settings.group_size
        {
            let group = declared.map_or(Group::Channel, Group::Size);
            if group.count(k) == groups {
                return Ok(group);
            }
            if settings.of_all {
                let size = group_text(declared);
                return fail(format!("[{}, {}] for {k} inputs and group_size {size}", group.count(k), self.n));
            }
        }
        if groups == 1 {
            return Ok(Group::Channel);
        }
        // An index that was not filled in is 0 throughout.
        let sizes = match index.filter(|index| index.iter().any(|&g| g != 0)) {
            Some(index) => {
                let mut members = vec![0usize; groups];
                index.iter().for_each(|&g| members[g as usize] += 1);
                let largest = members.into_iter().max().filter(|&size| size > 0 && k.div_ceil(size) == groups);
                largest.into_iter().collect()
            }
            None => infer::group_sizes(k, groups),
        };
        match (sizes.as_slice(), self.hint.group) {
            ([size], _) => Ok(Group::Size(*size)),
            ([], _) => {
                fail(format!("a number of groups that divides the {k} inputs, as no config gives the group size"))
            }
            (several, Some(Group::Size(size))) if several.contains(&size) => Ok(Group::Size(size)),
            (several, _) => {
                let several: Vec<String> = several.iter().map(usize::to_string).collect();
                let what = format!(
                    "module `{}`: groups of {} fit its {groups} scales for {k} inputs alike, and no config gives the group size; \
                     say which (--group)",
                    self.prefix,
                    several.join(" and of ")
                );
                Err(Error::unsupported(self.checkpoint.info(&self.name("scales"))?.file, what))
            }
        }
    }

    /// Notes where the module's own settings are not those of its tensors.
    fn own_settings(&self, group: Group, findings: &mut Vec<Finding>) {
        let Some(settings) = self.settings.filter(|settings| settings.known && !settings.of_all) else { return };
        if settings.bits != self.bits {
            let (says, bits) = (settings.bits, self.bits);
            let text = format!("the config says {says} bits for it, but its qzeros hold {bits}; read as {bits} bits");
            findings.push(Finding::new(self.prefix, text));
        }
        if let Some(declared) = settings.group_size
            && declared.map_or(Group::Channel, Group::Size).count(self.k) != self.groups
        {
            let says = group_text(declared);
            let is = group_text(if let Group::Size(size) = group { Some(size) } else { None });
            let text = format!("the config says group_size {says} for it, but its scales are for {is}; read as {is}");
            findings.push(Finding::new(self.prefix, text));
        }
    }

    /// Drops an index that says nothing; refuses a missing one that would have said something.
    fn meaningful(
        &self,
        index: Option<Vec<u32>>,
        group: Group,
        findings: &mut Vec<Finding>,
    ) -> Result<Option<Vec<u32>>> {
        let size = group.len(self.k).max(1);
        let reordered = self.groups > 1 && self.settings.is_some_and(|settings| settings.act_order);
        let name = self.name("g_idx");
        let Some(index) = index else {
            if reordered {
                let what = format!(
                    "there is no tensor `{name}`, but the config says desc_act: the order of columns is unknown"
                );
                return Err(Error::missing(self.checkpoint.path(), what));
            }
            if self.groups > 1 {
                findings.push(Finding::new(self.prefix, "g_idx is missing; columns were grouped in their order"));
            }
            return Ok(None);
        };
        if index.iter().enumerate().all(|(j, &g)| g as usize == j / size) {
            return Ok(None);
        }
        if index.iter().all(|&g| g == 0) {
            if reordered {
                let what =
                    format!("tensor `{name}`: expected {} groups as desc_act needs, got 0 throughout", self.groups);
                return Err(Error::malformed(self.checkpoint.info(&name)?.file, what));
            }
            findings.push(Finding::new(
                self.prefix,
                "g_idx is 0 throughout: not filled in, so columns were grouped in their order",
            ));
            return Ok(None);
        }
        if !self.settings.is_some_and(|settings| settings.desc_act) {
            let says = if self.config.is_some() { "the config says desc_act false" } else { "no config says desc_act" };
            findings
                .push(Finding::new(self.prefix, format!("{says}, but g_idx reorders the columns; g_idx was followed")));
        }
        Ok(Some(index))
    }

    /// The zero points.
    fn zeros(&self, findings: &mut Vec<Finding>) -> Result<StoredZeros<'static>> {
        let &Self { n, groups, bits, config, settings, .. } = self;
        let sym = settings.and_then(|settings| settings.sym);
        let mut find = |text: String| findings.push(Finding::new(self.prefix, text));
        let name = self.name("qzeros");
        if !self.checkpoint.contains(&name) {
            find("qzeros is missing and the config says sym: read as symmetric".into());
            return Ok(StoredZeros::Symmetric);
        }
        let words = self.checkpoint.ints(&name)?;
        // Most are all the same, which words tell sooner than zero points.
        let same = stream::repeated(&words, bits);
        let stored = same.map_or_else(|| stream::unpack_rows(&words, bits, groups * n), |zero| vec![zero]);
        let (version, text) = labels::zero_convention(&stored, bits, config, sym);
        text.into_iter().for_each(&mut find);
        let add = u16::from(version == GptqVersion::V1);
        let middle = 1u16 << (bits - 1);
        if stored.iter().all(|&z| u16::from(z) + add == middle) {
            return Ok(StoredZeros::Symmetric);
        }
        let stored = if same.is_some() { vec![stored[0]; groups * n] } else { stored };
        if sym == Some(true) {
            find(format!("the config says sym, but zero points other than {middle} are stored; they were followed"));
        }
        let beyond = stored.iter().filter(|&&z| u16::from(z) + add > (1 << bits) - 1).count();
        if beyond > 0 {
            find(format!(
                "{beyond} zero points are stored as {}, read as {}; other readers may take them for 0",
                (1 << bits) - 1,
                1 << bits
            ));
        }
        let zeros: Vec<u16> = stored.iter().map(|&z| u16::from(z) + add).collect();
        Ok(StoredZeros::Integer(zeros.into(), Strides::of_groups(n)))
    }
}

/// A group size as configs write it.
fn group_text(size: Option<usize>) -> String {
    size.map_or("-1".to_owned(), |size| size.to_string())
}

/// `[rows, columns]` to `[columns, rows]`.
pub(super) fn transposed<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}
