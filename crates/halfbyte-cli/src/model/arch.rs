//! `--arch`: of use where codes lie in a layout of one architecture, and no config says of which.

use super::{open_any, own_part};
use crate::args::HintArgs;
use crate::failure::{Failure, Result};
use halfbyte_checkpoint::{Hint, ModuleKind, Weights};
use std::path::Path;

/// Whether codes of a model lie in such a layout.
fn serves(weights: &Weights) -> bool {
    let lies =
        |name: &str| matches!(weights.kind(name), Ok(ModuleKind::Quantized(scheme)) if scheme.name == "fpa_intb");
    weights.modules().into_iter().any(lies)
}

/// Error: an architecture that says nothing of any of these models.
pub fn refuse_idle(hint: Hint, models: &[&Weights]) -> Result<()> {
    if hint.arch.is_none() || models.iter().any(|weights| serves(weights)) {
        return Ok(());
    }
    let names: Vec<String> = models.iter().map(|weights| weights.checkpoint().path().display().to_string()).collect();
    Err(Failure::usage(
        "--arch changes nothing here",
        format!(
            "no layer of {} has codes in the layout of fpA_intB kernels (TensorRT-LLM, Paddle)",
            names.join(" or of ")
        ),
        "leave --arch out",
    ))
}

/// What of a hint that was given for several models says something of each. Of none: all of it, which each refuses.
pub fn of_each(hint: HintArgs, models: &[&Path]) -> Result<Vec<HintArgs>> {
    if hint.arch.is_none() {
        return Ok(vec![hint; models.len()]);
    }
    let serves = |model: &&Path| Ok(serves(&open_any(&own_part(model)?, hint.into())?));
    let serves = models.iter().map(serves).collect::<Result<Vec<bool>>>()?;
    let of = |own: &bool| if *own || !serves.contains(&true) { hint } else { HintArgs { arch: None, ..hint } };
    Ok(serves.iter().map(of).collect())
}
