//! A model in another form of files: the same numbers, or a refusal.

use super::dense::first_not_in_f32;
use super::part::refuse_part;
use super::quantized::{Quantization, write_model};
use super::{Job, Linear, Written, linears};
use crate::error::{Error, Result};
use crate::scheme::{LinearWeight, StoredFormat, Weights};
use crate::target::{Target, unrepresentable};
use halfbyte::quantize::{Rtn, SymmetricScale, rtn};
use halfbyte::{Float, Floats, Group, QTensor, WeightFormat, Zero, format::reference};
use std::collections::HashMap;

/// What a model is converted to.
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// The form of the files.
    pub target: Target,
    /// Bits a code, which the form must have; None: as they are, or as the form has them.
    pub bits: Option<u32>,
    /// Groups along k, which the form must have; None: as they are, or as the form has them.
    pub group: Option<Group>,
    /// Scales on two levels: those of groups as whole multiples of one scale a channel, of this type. None: as they are, or as
    /// the form has them.
    pub channel_scale: Option<Float>,
    /// Whether modules whose numbers the form cannot hold are rounded to nearest again; otherwise they are refused.
    pub requantize: bool,
}

/// How modules are rounded again.
const SEARCH: Rtn = Rtn { symmetric: SymmetricScale::Narrow, search: true };

/// What a conversion has left.
#[derive(Clone, Debug, PartialEq)]
pub struct Converted {
    /// The folder.
    pub written: Written,
    /// Modules that were rounded again, each with what did not fit; also those that became dense whose numbers f32 does
    /// not hold.
    pub requantized: Vec<(String, String)>,
    /// Modules that are quantised in the source and dense here: embeddings and heads for which the form has no format.
    pub made_dense: Vec<String>,
}

/// Writes a quantised model in another form. Every weight stands for exactly the number that it stood for, unless
/// [`Conversion::requantize`] allows otherwise. Embeddings become dense where the form has no quantised ones (GGUF and our
/// own have), heads where it has none of their format, in GGUF where its blocks do not have their numbers: see
/// [`Converted::made_dense`].
///
/// *Errors:* a source in which nothing is quantised (for GGUF it may be dense, where no bits or groups are asked for), or that is the part of a rank; bits or groups that
/// were asked for and that the form has not; a module whose numbers the form cannot hold, with the first of them; otherwise as
/// [`write_model`]. After an error nothing is left.
pub fn convert(job: Job<'_>, conversion: Conversion) -> Result<Converted> {
    let Conversion { target, bits, group, channel_scale, requantize } = conversion;
    let source = job.source;
    refuse_part("convert a model", source)?;
    // None: the module is dense, or becomes so. Errors: the form has no format for it; it cannot be read.
    let choose = |module: &Linear<'_>| -> Result<Option<WeightFormat>> {
        let refuse = unrepresentable(module.name, target.name());
        let format = match module.source {
            None => return Ok(None),
            Some(StoredFormat::Codes(format)) => format,
            Some(StoredFormat::Floats { name, .. }) if !requantize => {
                return Err(refuse(format!("its codes, {name}, stand for values that no other form holds exactly")));
            }
            Some(StoredFormat::Floats { bits, block, .. }) => WeightFormat {
                bits,
                group: Group::Size(block),
                zero: Zero::Integer,
                scale: Float::F16,
                channel_scale: None,
            },
        };
        let wanted = WeightFormat { bits: bits.unwrap_or(format.bits), group: group.unwrap_or(format.group), ..format };
        let wanted = match channel_scale {
            None => wanted,
            Some(_) => WeightFormat { scale: Float::F32, channel_scale, ..wanted },
        };
        let nearest = target.nearest(wanted, module.shape).and_then(|nearest| {
            // What was asked for is there or refused.
            let asked =
                WeightFormat { bits: bits.unwrap_or(nearest.bits), group: group.unwrap_or(nearest.group), ..nearest };
            if asked != nearest {
                target.check(asked, module.shape)?;
            }
            match channel_scale {
                Some(_) if asked.channel_scale.is_none() => Err("its scales have one level, not two".to_owned()),
                _ => Ok(asked),
            }
        });
        // Only GGUF and our own form have quantised embeddings; a head is one product among others if it fits as it is, or
        // GGUF's blocks have its numbers.
        let stays = match (&nearest, target) {
            (Ok(nearest), Target::Native) if module.is_embedding() => *nearest == format,
            (Ok(nearest), _) if *nearest == wanted => target == Target::Gguf || !module.is_embedding(),
            (Ok(nearest), Target::Gguf) if module.is_head() => is_exact(source, module.name, *nearest)?,
            _ => !(module.is_embedding() || module.is_head()),
        };
        stays.then_some(nearest).transpose().map_err(refuse)
    };
    let (mut formats, mut made_dense, mut requantized) = (HashMap::new(), Vec::new(), Vec::new());
    for module in linears(source)? {
        if let Some(format) = choose(&module)? {
            formats.insert(module.name, format);
        } else if module.source.is_some() {
            if let Some(value) = first_not_in_f32(source, module.name)? {
                let reason = format!("it would be dense, in f32, and {value} is not exact in it");
                if !requantize {
                    return Err(unrepresentable(module.name, target.name())(reason));
                }
                requantized.push((module.name.to_owned(), reason));
            }
            made_dense.push(module.name.to_owned());
        }
    }
    let asked = bits.is_some() || group.is_some() || channel_scale.is_some();
    if formats.is_empty() && (target != Target::Gguf || asked) {
        return Err(Error::invalid("convert", "a model with quantised layers", "none"));
    }
    let mut refused = None;
    let quantization = Quantization {
        target,
        format: &mut |module| formats.get(module.name).copied(),
        quantize: &mut |module, weight, format| {
            let q = match weight {
                LinearWeight::Quantized(q) => q,
                LinearWeight::Dense { floats, shape } => {
                    requantized.push((module.name.to_owned(), "its codes stand for the values of a table".to_owned()));
                    return rtn(floats.as_floats(), *shape, format, SEARCH);
                }
            };
            let order = match q.group_index() {
                Some(_) if !target.has_group_index() => Err(halfbyte::Error::Invalid {
                    op: "convert",
                    expected: "no act-order, since the form has no group index".to_owned(),
                    got: "a group for each column".to_owned(),
                }),
                _ => Ok(()),
            };
            match order.and_then(|()| q.express(format)) {
                Ok(expressed) => Ok(expressed.into_owned()),
                Err(reason) if requantize => {
                    requantized.push((module.name.to_owned(), reason.to_string()));
                    rounded(q, format)
                }
                Err(reason) => {
                    refused = Some((module.name.to_owned(), reason.to_string()));
                    Err(reason)
                }
            }
        },
        dense: &mut |_| None,
        untied: None,
    };
    let written = write_model(job, quantization).map_err(|error| match refused {
        Some((module, reason)) => unrepresentable(&module, target.name())(reason),
        None => error,
    })?;
    Ok(Converted { written, requantized, made_dense })
}

/// Whether a format has exactly the numbers of a module.
fn is_exact(source: &Weights, name: &str, format: WeightFormat) -> Result<bool> {
    let is_exact = match source.load_linear(name)?.weight {
        LinearWeight::Quantized(q) => q.group_index().is_none() && q.express(format).is_ok(),
        LinearWeight::Dense { .. } => false,
    };
    source.release(name);
    Ok(is_exact)
}

/// What the tensor stands for, rounded to nearest in another format.
fn rounded(q: &QTensor, format: WeightFormat) -> halfbyte::Result<QTensor> {
    let weights: Vec<f32> = reference::dequantize(q).into_iter().map(|w| w as f32).collect();
    rtn(Floats::F32(&weights), [q.n(), q.k()], format, SEARCH)
}
