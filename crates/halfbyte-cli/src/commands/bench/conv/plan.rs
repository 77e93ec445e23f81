//! What `bench conv` measures: from a case file, or from options.

use super::Args;
use crate::args::WeightKind;
use crate::args::conv::Kind;
use crate::failure::{Exit, Failure, Result};
use halfbyte::conv::{Conv2dShape, Geometry};
use halfbyte::{Act, Float, Format, Group, WeightFormat, Zero};
use serde::Deserialize;
use std::path::Path;

/// A case file: shapes to be measured, with their origin.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// Where the shapes come from.
    origin: String,
    /// Formats of the weights.
    formats: Vec<String>,
    /// Images at a time.
    batch: Vec<usize>,
    #[serde(rename = "shape")]
    shapes: Vec<Shape>,
}

/// A convolution of a case; what is left out is 1, or 0 for padding.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shape {
    /// What it is.
    pub origin: String,
    pub ci: usize,
    pub co: usize,
    pub size: [usize; 2],
    pub kernel: [usize; 2],
    #[serde(default = "ones")]
    pub stride: [usize; 2],
    /// Above, left, below, right.
    #[serde(default)]
    pub padding: [usize; 4],
    #[serde(default = "ones")]
    pub dilation: [usize; 2],
    #[serde(default = "one")]
    pub groups: usize,
}

fn one() -> usize {
    1
}

fn ones() -> [usize; 2] {
    [1; 2]
}

impl Shape {
    /// What the layer fixes.
    pub fn geometry(&self) -> Geometry {
        let Self { ci, co, kernel, stride, padding, dilation, groups, .. } = *self;
        Geometry { ci, co, kernel, stride, padding, dilation, groups }
    }
}

/// What is measured unless told.
const DEFAULT: Kind = Kind::Floats(WeightKind::Quantized(Format {
    weight: WeightFormat {
        bits: 8,
        group: Group::Channel,
        zero: Zero::Symmetric,
        scale: Float::F16,
        channel_scale: None,
    },
    act: Act::A8,
}));

/// What is measured.
pub(super) struct Plan {
    pub origin: Option<String>,
    pub kinds: Vec<Kind>,
    pub batches: Vec<usize>,
    pub shapes: Vec<Shape>,
}

fn read(path: &Path) -> Result<(Case, Vec<Kind>)> {
    let refuse = |cause: String| {
        let what = format!("{} is not a case file of convolutions", path.display());
        Failure::new(Exit::Input, what, cause, "bench/cases/resnet50.toml shows the form")
    };
    let text = crate::text::read_text(path)?;
    let case: Case = toml::from_str(&text).map_err(|e| refuse(crate::text::toml_cause(&text, &e)))?;
    if case.formats.is_empty() || case.batch.is_empty() || case.shapes.is_empty() {
        return Err(refuse("expected at least one of each: formats, batch, shape".to_owned()));
    }
    let kinds = case.formats.iter().map(|name| name.parse().map_err(&refuse)).collect::<Result<_>>()?;
    Ok((case, kinds))
}

/// From the options.
pub(super) fn plan(args: &Args) -> Result<Plan> {
    let (origin, mut kinds, mut batches, shapes) = match &args.case {
        Some(path) => {
            let (case, kinds) = read(path)?;
            (Some(case.origin), kinds, case.batch, case.shapes)
        }
        None => {
            let Geometry { ci, co, kernel, stride, padding, dilation, groups } = args.sizes.geometry();
            let (origin, size) = (String::new(), args.sizes.size);
            let shape = Shape { origin, ci, co, size, kernel, stride, padding, dilation, groups };
            (None, vec![DEFAULT], vec![1], vec![shape])
        }
    };
    if !args.format.is_empty() {
        kinds.clone_from(&args.format);
    }
    if !args.batch.is_empty() {
        batches.clone_from(&args.batch);
    }
    Kind::refuse_unused(&kinds, &[("--x", args.x.is_some())], args.bytes)?;
    for (shape, &batch) in shapes.iter().flat_map(|shape| batches.iter().map(move |batch| (shape, batch))) {
        let refuse =
            |cause: String| Failure::usage("it is no convolution that can be measured", cause, "choose other sizes");
        Conv2dShape::new(shape.geometry(), batch, shape.size).map_err(|e| refuse(e.to_string()))?;
        if batch == 0 {
            return Err(refuse("a batch of no images takes no time".to_owned()));
        }
    }
    Ok(Plan { origin, kinds, batches, shapes })
}
