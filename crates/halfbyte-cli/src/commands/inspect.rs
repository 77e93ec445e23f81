//! `halfbyte inspect`: what is in a checkpoint, and what looks wrong.

use crate::app::App;
use crate::args::HintArgs;
use crate::escape::{escaped, path};
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::model::open_with;
use crate::progress::{Progress, Unit};
use crate::text::{Align, bytes, count, several, table};
use halfbyte_checkpoint::config::{CompressedTensorsFormat, CompressedTensorsGroup};
use halfbyte_checkpoint::inspect::TensorSummary;
use halfbyte_checkpoint::{Inspection, Part, QuantizationConfig, inspect};
use halfbyte_llm::check::{self, contradictions};
use halfbyte_llm::{Config, Error as LlmError};
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::path::PathBuf;

/// Show a model's architecture, tensors, formats, sizes, and every problem found.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder, or one file of tensors.
    model: PathBuf,
    #[command(flatten)]
    hint: HintArgs,
    /// Read all of the data too: find NaN, infinity, and scales and weights that are zero throughout.
    #[arg(long)]
    data: bool,
    /// Exit with status 1 if there is any finding, or if the model does not run.
    #[arg(long)]
    strict: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    inspection: Inspection,
    /// The rank whose part it is, if it is one.
    part: Option<Part>,
    /// Whether `halfbyte run` takes the configuration.
    runs: bool,
    /// Why not.
    obstacle: Option<String>,
    /// Whether all of the data was read.
    data: bool,
}

/// Prints the description.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let weights = open_with(&args.model, args.hint.into())?;
    let mut inspection = inspect(&weights)?;
    let obstacle = match Config::from_weights(&weights) {
        Err(why) => {
            inspection.findings.extend(weights.irregular_blocks());
            Some(match why {
                LlmError::Io { path, source } if source.kind() == ErrorKind::NotFound => {
                    format!("there is no {}", path.display())
                }
                other => other.to_string(),
            })
        }
        Ok(config) => {
            let found = contradictions(&config, &weights);
            let tokenizer = check::tokenizer(&config, &weights);
            let first = found.missing.iter().chain(&found.uncounted).chain(&tokenizer).next();
            let first = first.map(|finding| finding.to_string());
            inspection.findings.extend(found.into_findings());
            inspection.findings.extend(tokenizer);
            first
        }
    };
    if args.data {
        let progress = Progress::new(app, "reading", Unit::Bytes);
        let (cooperate, total) = (interrupt::cooperate(), inspection.total_bytes);
        let findings = weights.values(|_, bytes| {
            progress.at(bytes, total);
            !interrupt::cancelled()
        })?;
        drop((cooperate, progress));
        inspection.findings.extend(findings);
    }
    let passed = inspection.findings.is_empty() && obstacle.is_none();
    app.result(
        &Report { inspection, part: weights.part()?, runs: obstacle.is_none(), obstacle, data: args.data },
        human,
    )?;
    if args.strict && !passed {
        return Err(Failure::new(
            Exit::No,
            format!("{} has findings", args.model.display()),
            "--strict asks for a model without any that runs",
            "leave --strict out to have them told only",
        ));
    }
    Ok(())
}

/// Tensors or modules of the same name but for numbers, shape and format.
#[derive(PartialEq, Eq, Hash)]
struct Alike {
    name: String,
    shape: String,
    format: String,
    scheme: &'static str,
}

/// What the configuration says of the quantisation, a line for each kind of module.
fn declared(config: &QuantizationConfig) -> Vec<String> {
    let group = |size: Option<usize>| size.map_or("one scale a channel".to_owned(), |g| format!("groups of {g}"));
    let symmetry = |symmetric: Option<bool>| match symmetric {
        Some(true) => "symmetric",
        Some(false) => "asymmetric",
        None => "symmetry not stated",
    };
    match config {
        QuantizationConfig::Gptq(q) => {
            let order = if q.desc_act { ", act-order" } else { "" };
            let name = if q.marlin { "marlin" } else { q.version.name() };
            let groups = q.group_size.map_or("group size not stated".to_owned(), group);
            vec![format!("{name} {} bits, {groups}, {}{order}", q.bits, symmetry(q.sym))]
        }
        QuantizationConfig::Awq(q) => {
            let symmetric = q.zero_point.map(|zero_point| !zero_point);
            vec![format!("awq {} {} bits, {}, {}", q.version.name(), q.bits, group(q.group_size), symmetry(symmetric))]
        }
        QuantizationConfig::CompressedTensors(q) => {
            let line = |g: &CompressedTensorsGroup| {
                let format = g.format.map_or("compressed-tensors", CompressedTensorsFormat::name);
                let order = if g.act_order { ", act-order" } else { "" };
                let symmetry = symmetry(Some(g.symmetric));
                format!(
                    "{format} {} bits, {}, {symmetry}{order}, for {}",
                    g.bits,
                    g.strategy,
                    g.targets.texts().join(", ")
                )
            };
            q.groups.iter().map(line).collect()
        }
        QuantizationConfig::BitsAndBytes(q) => {
            let nested = if q.double_quant == Some(true) { ", scales quantised too" } else { "" };
            vec![format!("bitsandbytes {}{nested}", q.kind.name())]
        }
        QuantizationConfig::FpaIntB(q) => {
            let arch = q.arch.map_or("architecture not stated".to_owned(), |arch| format!("for sm_{arch}"));
            let groups = q.group_size.map_or(String::new(), |size| format!(", {}", group(size)));
            vec![format!("fpa_intb {} bits, {arch}{groups}", q.bits)]
        }
        QuantizationConfig::Mxfp4(_) => vec!["mxfp4, experts in groups of 32".to_owned()],
        QuantizationConfig::ModelOpt(q) => {
            vec![format!("modelopt {}", q.algorithm.as_deref().unwrap_or("for keys and values alone"))]
        }
        QuantizationConfig::Halfbyte(q) => {
            let others = if q.modules.is_empty() { "" } else { ", others by name" };
            vec![format!("halfbyte {}{others}", q.format)]
        }
        _ => Vec::new(),
    }
}

fn human(report: &Report) -> String {
    let i = &report.inspection;
    let architecture = escaped(i.architecture.as_deref().unwrap_or("no architecture stated"));
    let mut out = format!("{}: {architecture}", path(&i.path));
    if let Some(Part { rank, size, .. }) = report.part {
        out += &format!(", the part of rank {rank} of {size}");
    }
    out += "\n";
    out += &format!(
        "{} weights, {} in {} and {}, {:.2} bits a weight\n",
        count(i.parameters),
        bytes(i.total_bytes),
        several(i.tensors.len(), "tensor"),
        several(i.files.len(), "file"),
        i.bits_per_weight,
    );
    for line in i.quantization.iter().flat_map(declared) {
        out += &format!("declared: {}\n", escaped(&line));
    }
    out += "\n";

    // Each with the place of its first member, the number of members, and their size.
    let mut groups: HashMap<Alike, (usize, usize, u64)> = HashMap::new();
    let mut add = |alike: Alike, size: u64| {
        let next = groups.len();
        let (_, members, total) = groups.entry(alike).or_insert((next, 0, 0));
        *members += 1;
        *total += size;
    };
    let prefixes: HashSet<&str> = i.modules.iter().map(|module| module.name.as_str()).collect();
    for module in &i.modules {
        let shape = module.shape.map_or("?".to_owned(), |s| format!("{s:?}"));
        let order = if module.act_order { " act-order" } else { "" };
        let format = format!("{}{order}", module.format);
        add(Alike { name: pattern(&module.name), shape, format, scheme: module.scheme }, module.bytes);
    }
    for tensor in i.tensors.iter().filter(|tensor| !of_module(tensor, &prefixes)) {
        let (name, format) = (pattern(&tensor.name), tensor.dtype.name().to_lowercase());
        add(Alike { name, shape: format!("{:?}", tensor.shape), format, scheme: "dense" }, tensor.bytes);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_unstable_by_key(|(_, (first, ..))| *first);
    let rows: Vec<Vec<String>> = groups
        .into_iter()
        .map(|(alike, (_, members, size))| {
            vec![alike.name, members.to_string(), alike.shape, alike.scheme.to_owned(), alike.format, bytes(size)]
        })
        .collect();
    let columns = [
        ("module", Align::Left),
        ("count", Align::Right),
        ("shape", Align::Left),
        ("stored", Align::Left),
        ("format", Align::Left),
        ("size", Align::Right),
    ];
    out += &table(&columns, &rows);
    out += "\n";
    match i.findings.len() {
        0 if report.data => out += "no problems found, data read\n",
        0 => out += "no problems found; --data looks at the numbers too\n",
        found => {
            out += &format!("{}:\n", several(found, "finding"));
            i.findings.iter().for_each(|finding| out += &format!("  {}\n", escaped(&finding.to_string())));
        }
    }
    if let Some(obstacle) = &report.obstacle {
        out += &format!("does not run: {}\n", escaped(obstacle));
    }
    out
}

/// Whether a tensor was counted with its module. Some schemes hang theirs below the weight: `weight.absmax`.
fn of_module(tensor: &TensorSummary, prefixes: &HashSet<&str>) -> bool {
    let below_weight = tensor.name.rsplit_once(".weight.").map(|(prefix, _)| prefix);
    let prefix = tensor.name.rsplit_once('.').map(|(prefix, _)| prefix);
    below_weight.into_iter().chain(prefix).any(|prefix| prefixes.contains(prefix))
}

/// A name with `*` for numbers.
fn pattern(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}
