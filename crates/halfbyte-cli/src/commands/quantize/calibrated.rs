//! Quantising with calibration text: each layer by the inputs that it has in the model.

use super::{Head, Method, Quantized};
use crate::app::App;
use crate::args::{ActArg, RtnArgs, whole};
use crate::escape::escaped;
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::model::files_of;
use crate::progress::{Progress, Unit};
use crate::side_file;
use crate::text::{Align, several, table};
use halfbyte::quantize::{Gptq, Refine, Rtn};
use halfbyte::{Act, WeightFormat};
use halfbyte_checkpoint::folder::check_target;
use halfbyte_checkpoint::{Error as CheckpointError, Job, Quantization, Replacement, Target, Weights, write_model};
use halfbyte_llm::calibrate::{self, ActivationReport, ByAwq, ByGptq, Doing, Finished, LayerReport, RoundToNearest};
use halfbyte_llm::{Config, Error as LlmError, Tokenizer, eval};
use serde::Serialize;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// What calibration takes, and how it is used.
#[derive(Clone, Debug, clap::Args)]
pub struct CalibrationArgs {
    /// Text to calibrate with: each line one document, {"text": "..."}. With it every method reports the loss of each layer.
    #[arg(long, value_name = "FILE.jsonl")]
    pub calibration: Option<PathBuf>,
    /// Windows of the text that are used, the first ones.
    #[arg(long, default_value = "256", value_name = "N", requires = "calibration", value_parser = whole::<usize>(1..=0xffff_ffff))]
    samples: usize,
    /// Tokens a window. All vectors between two blocks are kept in memory: 4 · samples · window · hidden size bytes.
    #[arg(long, default_value = "512", value_name = "TOKENS", requires = "calibration", value_parser = whole::<usize>(1..=0xffff_ffff))]
    window: usize,
    /// GPTQ: columns in order of falling magnitude of their inputs.
    #[arg(long)]
    act_order: bool,
    /// GPTQ: all scales from the weights as they are, for groups of columns as they lie.
    #[arg(long)]
    static_groups: bool,
    /// GPTQ: added to the diagonal of the Hessian, as a fraction of its mean [default: 0.01].
    #[arg(long, value_name = "FRACTION", value_parser = damping)]
    damping: Option<f64>,
    /// GPTQ: aim at the outputs of the dense model, which runs beside the quantised one, instead of those that each layer has.
    #[arg(long)]
    correct: bool,
    /// GPTQ: let every scale and code move this often afterwards, wherever that lowers the loss; 3 is enough [default: 0].
    #[arg(long, value_name = "N", value_parser = whole::<u16>(0..=1000))]
    sweeps: Option<u16>,
    /// Take a layer's inputs after everything before it is quantised (the default).
    #[arg(long, requires = "calibration", overrides_with = "no_true_sequential")]
    true_sequential: bool,
    /// Take all inputs of a block at once, before any of it is quantised: faster, and a little worse.
    #[arg(long, requires = "calibration")]
    no_true_sequential: bool,
    /// Activations whose cost is told for each layer; the model's files do not depend on it. a16: none, which saves a product
    /// a layer.
    #[arg(long, value_enum, default_value = "a8", value_name = "ACT", requires = "calibration")]
    report_act: ActArg,
    /// Write what became of each layer to this file too.
    #[arg(long, value_name = "FILE.json", requires = "calibration")]
    report: Option<PathBuf>,
    /// Discard what an earlier run left unfinished, and begin anew.
    #[arg(long, requires = "calibration")]
    restart: bool,
}

fn damping(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(fraction) if (0.0..=10.0).contains(&fraction) => Ok(fraction),
        _ => Err("expected a number from 0 to 10".to_owned()),
    }
}

impl CalibrationArgs {
    /// Whether groups hold columns that do not lie side by side.
    pub fn permutes(&self) -> bool {
        self.act_order && !self.static_groups
    }

    /// Errors: a method without the text that it needs, options that change nothing.
    pub fn check(&self, method: Method, rtn: RtnArgs) -> Result<()> {
        let [name, words] = method.names();
        if method != Method::Rtn && self.calibration.is_none() {
            return Err(Failure::usage(
                format!("--method {name} needs calibration text"),
                "it chooses codes by the inputs of each layer, and without text there are none",
                "add --calibration FILE.jsonl with lines {\"text\": \"...\"}",
            ));
        }
        let of_gptq = method != Method::Gptq;
        let idle = [
            ("--act-order", self.act_order && of_gptq),
            ("--static-groups", self.static_groups && of_gptq),
            ("--damping", self.damping.is_some() && of_gptq),
            ("--correct", self.correct && of_gptq),
            ("--sweeps", self.sweeps.is_some() && of_gptq),
            ("--search", rtn.search && method == Method::Awq),
        ];
        match idle.iter().find(|(_, idle)| *idle) {
            None => Ok(()),
            Some((option, _)) => Err(Failure::usage(
                format!("{option} changes nothing with --method {name}"),
                format!("{words} has no such choice"),
                "add --method gptq, or leave the option out",
            )),
        }
    }

    fn gptq(&self, rtn: Rtn) -> ByGptq {
        /// Of the correction, which serves well.
        const CORRECTION: f64 = 0.1;
        let damping = self.damping.unwrap_or(Gptq::default().damping);
        let gptq = Gptq {
            damping,
            act_order: self.act_order,
            static_groups: self.static_groups,
            symmetric: rtn.symmetric,
            search: rtn.search,
        };
        let sweeps = usize::from(self.sweeps.unwrap_or(0));
        ByGptq {
            gptq,
            correct: self.correct.then_some(CORRECTION),
            refine: (sweeps > 0).then_some(Refine { sweeps, damping }),
        }
    }
}

/// What a command has in hand when calibration begins.
pub struct Task<'a> {
    pub app: &'a App,
    pub source: &'a Weights,
    pub text: &'a Path,
    pub calibration: &'a CalibrationArgs,
    pub method: Method,
    pub rtn: Rtn,
    pub format: WeightFormat,
    pub head: Option<&'a Head>,
    pub target: Target,
    pub overwrite: bool,
}

/// How calibration went.
#[derive(Clone, Debug, Serialize)]
pub struct Calibration {
    /// Windows of text that were used.
    windows: usize,
    /// Tokens a window.
    window: usize,
    /// The folder of unfinished work, in a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    work: Option<PathBuf>,
    /// Bytes that it takes besides the result, in a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    work_bytes: Option<u64>,
    /// The most memory that the process held at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_resident_bytes: Option<u64>,
    /// The activations whose cost `layers` tell.
    report_act: &'static str,
    #[serde(skip)]
    act: Act,
    /// What became of each layer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    layers: Vec<LayerReport>,
}

/// Quantises and writes the folder, or says what it would take; fills in the result.
pub fn run(task: &Task<'_>, result: &mut Quantized) -> Result<()> {
    let Task { app, source, calibration, .. } = *task;
    let mut inputs = files_of(source.checkpoint().path());
    inputs.push(task.text.to_owned());
    if let Some(path) = &calibration.report {
        // Before hours of work: whether it can be written there.
        let work = calibrate::work_folder(&result.output)?;
        for place in [&result.output, &work] {
            side_file::check("--report", path, task.overwrite, &inputs, Some(place))?;
        }
    }
    let config = Config::from_weights(source)?;
    let tokens = tokens(task, &config)?;
    let cpu = app.cpu()?;
    let method: Box<dyn calibrate::Method> = match task.method {
        Method::Rtn => Box::new(RoundToNearest(task.rtn)),
        Method::Gptq => Box::new(calibration.gptq(task.rtn)),
        Method::Awq => Box::new(ByAwq { symmetric: task.rtn.symmetric }),
    };
    let job = calibrate::Job {
        source,
        config: &config,
        cpu: &cpu,
        tokens: &tokens,
        window: calibration.window,
        format: task.format,
        head: task.head.map(Head::calibrated),
        act: calibration.report_act.into(),
        method: method.as_ref(),
        true_sequential: !calibration.no_true_sequential,
        target: &result.output,
        restart: calibration.restart,
    };
    let mut summary = Calibration {
        windows: tokens.len() / calibration.window,
        window: calibration.window,
        work: None,
        work_bytes: None,
        peak_resident_bytes: None,
        report_act: calibration.report_act.name(),
        act: calibration.report_act.into(),
        layers: Vec::new(),
    };
    if result.dry_run {
        let estimate = calibrate::estimate(&job)?;
        result.seconds += estimate.seconds;
        result.peak_memory_bytes = result.peak_memory_bytes.max(Some(estimate.peak_memory_bytes));
        summary.work = Some(calibrate::work_folder(&result.output)?);
        summary.work_bytes = Some(estimate.work_bytes);
        result.calibration = Some(summary);
        return Ok(());
    }
    // The model is written last: better to know at once that it cannot be.
    check_target(source, &result.output, task.target, task.overwrite)?;
    let cooperate = interrupt::cooperate();
    let finished = quantize(app, &job).map_err(|e| resumable(e, &result.output))?;
    summary.layers = finished.report().to_vec();
    if task.method != Method::Rtn {
        tell_unseen(app, &summary.layers);
    }
    write(task, &finished, result)?;
    // The model is there: a report that cannot be written is an error, and leaves no work behind.
    let reported = calibration.report.as_ref().map(|path| write_report(path, &summary, task.overwrite, &inputs));
    finished.remove()?;
    drop(cooperate);
    summary.peak_resident_bytes = crate::machine::peak_resident();
    result.calibration = Some(summary);
    reported.unwrap_or(Ok(()))
}

/// Whole windows of the calibration text, as many as there are and were asked for.
fn tokens(task: &Task<'_>, config: &Config) -> Result<Vec<u32>> {
    let CalibrationArgs { samples, window, .. } = *task.calibration;
    let documents = eval::documents(task.text)?;
    let tokenizer = Tokenizer::from_weights(task.source)?;
    let tokens = calibrate::windows(&tokenizer, &documents, config.bos, window, samples)?;
    match tokens.len() / window {
        0 => Err(Failure::new(
            Exit::Input,
            format!("{} is too short", task.text.display()),
            format!("it does not fill one window of {window} tokens"),
            "give more text, or a smaller --window",
        )),
        windows => {
            if windows < samples {
                task.app.note(&format!(
                    "note: {} fills {} of {window} tokens, not {samples}; all of it is used",
                    task.text.display(),
                    several(windows, "window")
                ));
            }
            Ok(tokens)
        }
    }
}

fn quantize(app: &App, job: &calibrate::Job<'_>) -> std::result::Result<Finished, LlmError> {
    let progress = Progress::steps(app);
    calibrate::quantize(job, &mut |at| {
        let left = at.seconds_left.map_or(String::new(), |seconds| format!(", about {} left", duration(seconds)));
        let percent = (100.0 * at.done).floor();
        let doing = match at.doing {
            Doing::Replaying => format!("was done before, running the text through it {percent} %"),
            Doing::Inputs => format!("inputs of {} {percent} %", short(at.layer)),
            Doing::Quantizing => format!("quantising {}", short(at.layer)),
            Doing::Outputs => format!("outputs {percent} %"),
        };
        progress.step(format!("block {} of {}: {doing}{left}", at.block + 1, at.blocks));
        if interrupt::cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

/// Says which layers had inputs by which nothing could be chosen.
fn tell_unseen(app: &App, layers: &[LayerReport]) {
    let mut unseen = layers.iter().filter(|layer| layer.dead_columns == layer.shape[1]);
    if let Some(first) = unseen.next() {
        let others = match unseen.count() {
            0 => String::new(),
            others => format!(" and {others} more"),
        };
        let why = "its inputs were all zero";
        app.note(&format!("note: `{}`{others}: rounded to nearest, since {why}", escaped(&first.name)));
    }
}

/// Writes the model from what lies in the work folder.
fn write(task: &Task<'_>, finished: &Finished, result: &mut Quantized) -> Result<()> {
    let progress = Progress::new(task.app, "writing", Unit::Bytes);
    let mut report = |at: halfbyte_checkpoint::Progress<'_>| progress.at(at.bytes, at.total_bytes);
    let job = Job {
        overwrite: task.overwrite,
        progress: Some(&mut report),
        cancel: Some(&interrupt::cancelled),
        ..Job::new(task.source, &result.output)
    };
    let quantization = Quantization {
        target: task.target,
        format: &mut |layer| finished.format(layer.name),
        quantize: &mut |layer, _, _| {
            let refuse = |cause| halfbyte::Error::Device { op: "read finished work", cause };
            let tensor = finished.tensor(layer.name).map_err(|e| refuse(e.to_string()))?;
            tensor.ok_or_else(|| refuse(format!("{} is not in it", layer.name)))
        },
        dense: &mut |name| finished.changed(name).map(<[f32]>::to_vec),
        untied: task.head.and_then(Head::untied),
    };
    let written = write_model(job, quantization).map_err(|e| match e {
        CheckpointError::Cancelled => resumable(LlmError::Cancelled, &result.output),
        other => other.into(),
    })?;
    drop(progress);
    task.app.findings(&written.findings);
    result.output = written.path;
    result.sizes.bytes_after = written.tensor_bytes;
    result.sizes.modules = written.quantized;
    Ok(())
}

/// An interrupted run says where it goes on.
fn resumable(error: LlmError, target: &Path) -> Failure {
    match (error, calibrate::work_folder(target)) {
        (LlmError::Cancelled, Ok(folder)) => Failure::new(
            Exit::Interrupted,
            "interrupted",
            format!("asked to stop (Ctrl-C or a signal); finished blocks are kept in {}", folder.display()),
            "run the same command again to go on",
        ),
        // Blocks that were finished before, or by another run, are still there.
        (error, Ok(folder)) if folder.is_dir() => {
            let kept = format!("finished blocks are kept in {}; --restart discards them", folder.display());
            Failure::from(error).and_help(&kept)
        }
        (error, _) => error.into(),
    }
}

/// Writes the report; what was there stays until it is whole.
fn write_report(path: &Path, summary: &Calibration, overwrite: bool, inputs: &[PathBuf]) -> Result<()> {
    let refuse = |e: std::io::Error| Failure::io("write", path, &e);
    let mut file = Replacement::create(path, overwrite, inputs)?;
    serde_json::to_writer_pretty(&mut file, summary).map_err(|e| refuse(e.into()))?;
    file.write_all(b"\n").map_err(refuse)?;
    Ok(file.commit()?)
}

/// The layers as a table: a person must see where the loss is, and which layers quantised activations are not for.
pub fn human(calibration: &Calibration) -> String {
    let Calibration { layers, report_act: act, .. } = calibration;
    if layers.is_empty() {
        return String::new();
    }
    let measured = layers.iter().any(|layer| layer.activations.is_some());
    let adds = format!("{act} adds");
    let of_activations = [(adds.as_str(), Align::Right), ("whole", Align::Right), ("better", Align::Left)];
    let columns = [
        &[("layer", Align::Left), ("n", Align::Right), ("k", Align::Right), ("a16 error", Align::Right)][..],
        if measured { &of_activations } else { &[] },
        &[("weight error", Align::Right), ("bits", Align::Right), ("damping", Align::Right), ("dead", Align::Right)],
    ]
    .concat();
    let percent = |error: f64| format!("{:.4} %", 100.0 * error);
    let row = |layer: &LayerReport| {
        let [n, k] = layer.shape.map(|len| len.to_string());
        let mut row = vec![short(&layer.name).to_owned(), n, k, percent(layer.output_error)];
        if let Some(activations) = &layer.activations {
            let better = if activations.stays_a16 { "a16" } else { act };
            row.extend([percent(activations.error), percent(activations.whole_error), better.to_owned()]);
        }
        row.extend([
            percent(layer.weight_error),
            format!("{:.3}", layer.bits_per_weight),
            layer.damping.map_or("-".to_owned(), |damping| damping.to_string()),
            layer.dead_columns.to_string(),
        ]);
        row
    };
    let mut out = table(&columns, &layers.iter().map(row).collect::<Vec<_>>());
    if measured {
        let stays = layers.iter().filter(|layer| layer.activations.is_some_and(|a| a.stays_a16)).count();
        out += &format!(
            "{adds}: what inputs of 8 bits, {}, add to the error of outputs; {stays} of {} better stay a16: it is \
             more than {} %, and more than their weights' error\n",
            rule(calibration.act),
            several(layers.len(), "layer"),
            100.0 * ActivationReport::OUTLIERS
        );
    }
    out
}

/// The rule of quantised activations in words.
fn rule(act: Act) -> &'static str {
    match act {
        Act::A8Asym => "with scale and offset for each row and group",
        Act::A8 | Act::A16 | Act::A32 => "with a scale for each row and group",
    }
}

impl Calibration {
    /// Bytes of the work folder, in a dry run.
    pub fn work_bytes(&self) -> u64 {
        self.work_bytes.unwrap_or(0)
    }
}

/// A layer's name without what all of them begin with.
fn short(name: &str) -> &str {
    if name.is_empty() { "all layers" } else { name.strip_prefix("model.layers.").unwrap_or(name) }
}

fn duration(seconds: f64) -> String {
    match seconds.round() as u64 {
        0..120 => format!("{seconds:.0} s"),
        120..7200 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}
