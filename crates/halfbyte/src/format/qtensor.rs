//! The canonical quantised tensor: one code a byte, in row-major order, with its scales and zeros.

use super::factors::{Factors, zero_points};
use super::{Group, WeightFormat, Zero};
use crate::error::{Error, Result};
use crate::memory::{check_columns, check_empty, collected};

/// Where zero lies, group by group.
#[derive(Clone, Debug, PartialEq)]
pub enum Zeros {
    /// In the middle of the codes, everywhere.
    Symmetric,
    /// Zero points, `[n, groups]`, each from 0 to `2^bits`.
    Integer(Vec<u16>),
    /// Offsets added after scaling, `[n, groups]`.
    Float(Vec<f32>),
}

/// Integer codes, scales and zeros of a logical float matrix `[n, k]`.
///
/// `w[i, j] = scales[i, g] · (codes[i, j] − zero[i, g])`, or `scales[i, g] · codes[i, j] + offset[i, g]`, with
/// `g = group of column j`: `j / group size`, or `group_index[j]` where columns were quantised in another order
/// (act-order). Of a part of a matrix's columns the index may name more groups than so many columns would fill: each has then
/// fewer columns. With two levels `scales[i, g] = channel_scales[i] · factors[i, g]`.
#[derive(Clone, Debug, PartialEq)]
pub struct QTensor {
    format: WeightFormat,
    n: usize,
    k: usize,
    groups: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Zeros,
    group_index: Option<Vec<u32>>,
    factors: Option<Factors>,
}

impl QTensor {
    /// Builds a tensor from its parts.
    ///
    /// Shapes: `codes` `[n, k]`; `scales` `[n, groups]` (a per-tensor scale is repeated for each row); `zeros` the
    /// same; `group_index` `[k]`. Errors: a length that does not fit, a code or zero beyond its bits, a scale that is
    /// not finite or not exact in the format's scale type, with two levels scales that are no multiples of one for the channel
    /// or products of code and factor beyond a byte, a group index out of range. An index that says no more than
    /// `j / group size` is dropped.
    pub fn new(
        format: WeightFormat,
        [n, k]: [usize; 2],
        codes: Vec<u8>,
        scales: Vec<f32>,
        zeros: Zeros,
        group_index: Option<Vec<u32>>,
    ) -> Result<Self> {
        const OP: &str = "qtensor";
        format.validate()?;
        check_columns(OP, k)?;
        let has_scales = |groups: usize| n.checked_mul(groups) == Some(scales.len());
        let groups = groups(format.group, k, group_index.as_deref(), has_scales);
        let size = |a: usize, b: usize, what: &str| {
            a.checked_mul(b).ok_or_else(|| Error::invalid(OP, format!("{what} that fit memory"), format!("{a} × {b}")))
        };
        let check = |what: &str, got: usize, want: usize| {
            if got == want { Ok(()) } else { Err(Error::invalid(OP, format!("{want} {what}"), got.to_string())) }
        };
        check("codes", codes.len(), size(n, k, "codes")?)?;
        check_empty(OP, [n, k])?;
        check_empty(OP, [n, groups])?;
        let of_groups = size(n, groups, "scales")?;
        check("scales", scales.len(), of_groups)?;
        // The largest code and not the first that is too large: this search has no exits, and is as fast as memory.
        let code = codes.iter().fold(0, |most, &code| code.max(most));
        if u32::from(code) > format.max_code() {
            return Err(Error::invalid(OP, format!("codes of {} bits", format.bits), code.to_string()));
        }
        let exact = |what: &str, values: &[f32]| match values
            .iter()
            .find(|&&s| format.scale.round(s) != s || !s.is_finite())
        {
            None => Ok(()),
            Some(s) => Err(Error::invalid(OP, format!("{what} finite and exact in {}", format.scale), s.to_string())),
        };
        exact("scales", &scales)?;
        match (&zeros, format.zero) {
            (Zeros::Symmetric, Zero::Symmetric) => {}
            (Zeros::Integer(z), Zero::Integer) => {
                check("zero points", z.len(), of_groups)?;
                if let Some(z) = z.iter().find(|&&z| u32::from(z) > format.max_code() + 1) {
                    return Err(Error::invalid(
                        OP,
                        format!("zero points up to {}", format.max_code() + 1),
                        z.to_string(),
                    ));
                }
            }
            (Zeros::Float(o), Zero::Float) => {
                check("offsets", o.len(), of_groups)?;
                exact("offsets", o)?;
            }
            (got, want) => return Err(Error::invalid(OP, want.to_string(), zeros_name(got))),
        }
        if format.group == Group::Tensor {
            let alike = match &zeros {
                Zeros::Symmetric => true,
                Zeros::Integer(z) => is_one(z),
                Zeros::Float(o) => is_one(o),
            };
            if !alike || !is_one(&scales) {
                return Err(Error::invalid(OP, "one scale and zero for the whole tensor", "several"));
            }
        }
        let group_index = match group_index {
            None => None,
            Some(index) => {
                check("group indices", index.len(), k)?;
                if let Some(g) = index.iter().find(|&&g| g as usize >= groups) {
                    return Err(Error::invalid(OP, format!("group indices below {groups}"), g.to_string()));
                }
                let size = format.group.len(k).max(1);
                let trivial = index.iter().enumerate().all(|(j, &g)| g as usize == j / size);
                (!trivial).then_some(index)
            }
        };
        let factors = match format.channel_scale {
            None => None,
            Some(dtype) => {
                let scale = |i: usize, g: usize| scales[i * groups + g];
                Some(Factors::of(OP, [n, groups], scale, zero_points(format, &zeros, groups), dtype)?)
            }
        };
        Ok(Self { format, n, k, groups, codes, scales, zeros, group_index, factors })
    }

    /// What the codes mean.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Output channels (rows).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction (columns).
    pub fn k(&self) -> usize {
        self.k
    }

    /// Groups along k.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Codes, `[n, k]`, one a byte, unsigned.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The codes alone.
    pub(crate) fn into_codes(self) -> Vec<u8> {
        self.codes
    }

    /// Scales, `[n, groups]`.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Scales of channels, `[n]`, the greatest that give [`QTensor::scales`]; None without two levels.
    pub fn channel_scales(&self) -> Option<&[f32]> {
        self.factors.as_ref().map(|factors| factors.channel.as_slice())
    }

    /// Factors of groups, `[n, groups]`, each from 1 to 16; None without two levels.
    pub fn factors(&self) -> Option<&[u8]> {
        self.factors.as_ref().map(|factors| factors.factors.as_slice())
    }

    /// Zeros or offsets.
    pub fn zeros(&self) -> &Zeros {
        &self.zeros
    }

    /// Group of each column, if it is not simply `j / group size`.
    pub fn group_index(&self) -> Option<&[u32]> {
        self.group_index.as_deref()
    }

    /// Group of column `j`. Panics if there is a group index and `j` is not below k.
    pub fn group_of(&self, j: usize) -> usize {
        match (&self.group_index, self.format.group) {
            (Some(index), _) => index[j] as usize,
            (None, Group::Size(g)) => j / g,
            (None, _) => 0,
        }
    }

    /// Groups of quantised activations along k; see [`WeightFormat::activation_group`].
    pub fn activation_groups(&self) -> usize {
        match self.format.activation_group() {
            Group::Size(_) => self.groups,
            group => group.count(self.k),
        }
    }

    /// Group of column `j` of quantised activations. Panics as [`QTensor::group_of`] does.
    pub fn activation_group_of(&self, j: usize) -> usize {
        if self.format.channel_scale.is_some() { 0 } else { self.group_of(j) }
    }

    /// Zero point of row `i` and group `g` in codes, for formats without float offsets. Panics if each group has one of its own and
    /// they are not there.
    pub fn zero_point(&self, i: usize, g: usize) -> Option<u32> {
        match &self.zeros {
            Zeros::Symmetric => Some(self.format.middle()),
            Zeros::Integer(z) => Some(u32::from(z[i * self.groups() + g])),
            Zeros::Float(_) => None,
        }
    }

    /// Some of the rows. Errors: rows that are not there, memory that is short.
    pub fn rows(&self, rows: std::ops::Range<usize>) -> Result<Self> {
        const OP: &str = "qtensor";
        if rows.start > rows.end || rows.end > self.n {
            return Err(Error::invalid(OP, format!("rows of {}", self.n), format!("{rows:?}")));
        }
        fn part<T: Copy>(values: &[T], width: usize, rows: &std::ops::Range<usize>) -> Result<Vec<T>> {
            let values = &values[rows.start * width..rows.end * width];
            collected(OP, values.len(), values.iter().copied())
        }
        let groups = self.groups();
        let zeros = match &self.zeros {
            Zeros::Symmetric => Zeros::Symmetric,
            Zeros::Integer(z) => Zeros::Integer(part(z, groups, &rows)?),
            Zeros::Float(o) => Zeros::Float(part(o, groups, &rows)?),
        };
        let factors = match &self.factors {
            None => None,
            Some(factors) => Some(Factors {
                channel: part(&factors.channel, 1, &rows)?,
                factors: part(&factors.factors, groups, &rows)?,
            }),
        };
        Ok(Self {
            format: self.format,
            n: rows.len(),
            k: self.k,
            groups,
            codes: part(&self.codes, self.k, &rows)?,
            scales: part(&self.scales, groups, &rows)?,
            zeros,
            group_index: self.group_index.clone(),
            factors,
        })
    }
}

/// Groups of k columns: as many as they fill, or more where an index names more and there are scales for them.
pub(crate) fn groups(group: Group, k: usize, index: Option<&[u32]>, has_scales: impl Fn(usize) -> bool) -> usize {
    let named = match (group, index) {
        (Group::Size(_), Some(index)) => index.iter().max().map_or(0, |&most| most as usize + 1),
        _ => 0,
    };
    let filled = group.count(k);
    if named > filled && has_scales(named) { named } else { filled }
}

/// Whether there is one value, however often.
fn is_one<T: PartialEq>(values: &[T]) -> bool {
    values.iter().all(|value| *value == values[0])
}

fn zeros_name(zeros: &Zeros) -> &'static str {
    match zeros {
        Zeros::Symmetric => "no zero points",
        Zeros::Integer(_) => "integer zero points",
        Zeros::Float(_) => "float offsets",
    }
}
