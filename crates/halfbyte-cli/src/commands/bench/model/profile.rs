//! Where the time goes: each step of a layer beside what the machine allows, for a token that is written and for a prompt.

use super::batch::Steps;
use super::limits::Machine;
use super::speed::{Speed, Work, read, tokens};
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::progress::Progress;
use crate::text::{Align, bytes, table};
use crate::timing::Measured;
use halfbyte::cpu::Cpu;
use halfbyte_llm::profile::{Profile, TimedStep};
use halfbyte_llm::{Device, Model, Session};
use serde::Serialize;

/// Bytes of weights that may stay in a cache from one step to the next: as much as the largest in the field holds.
const LARGEST_CACHE: usize = 256 << 20;

/// What was timed, each repetition but the first: tokens that are written, prompts that are read.
pub struct Timed {
    decode: Vec<Profile>,
    prefill: Vec<Profile>,
}

/// Times the steps of a token after `work.depth` others, and of the prompt, `work.repetitions` times behind one that does not count.
pub fn timed(model: &Model, cpu: &Cpu, work: Work, progress: &Progress) -> Result<Timed> {
    let tokens = tokens(model, work.prompt.max(work.depth).max(1));
    let mut session = Session::new(model, cpu, work.context())?;
    let mut repeated = |before: usize, timed: &[u32]| {
        session.clear()?;
        if before > 0 {
            read(&mut session, &tokens[..before])?;
        }
        let mut profiles = Vec::new();
        for run in 0..=work.repetitions {
            if interrupt::cancelled() {
                return Err(Failure::interrupted());
            }
            session.forget(before)?;
            let profile = session.profile(timed)?;
            if run > 0 {
                profiles.push(profile);
            }
        }
        Ok(profiles)
    };
    progress.step("profile of decoding");
    let decode = repeated(work.depth, &tokens[..1])?;
    progress.step(format!("profile of prefill of {} tokens", work.prompt));
    let prefill = repeated(0, &tokens[..work.prompt])?;
    Ok(Timed { decode, prefill })
}

/// The profiles of a model.
#[derive(Debug, Serialize)]
pub struct Profiles {
    /// A token that is written.
    decode: Table,
    /// The prompt.
    prefill: Table,
    /// Steps of many texts, each token by itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    batches: Vec<OfTexts>,
    /// Whether kernels were launched one by one to be timed.
    one_by_one: bool,
    /// Whether all layers of a token's step are one kernel, where it is not profiled.
    layers_are_one_kernel: bool,
    /// What such a kernel would need, where there is one for other models.
    #[serde(skip_serializing_if = "Option::is_none")]
    one_kernel_needs: Option<String>,
    /// Whether the weights of a step fit a cache.
    weights_may_be_cached: bool,
    /// What the limits follow from; None: it was not measured.
    #[serde(skip)]
    machine: Option<Machine>,
}

/// A step of many texts.
#[derive(Debug, Serialize)]
struct OfTexts {
    texts: usize,
    #[serde(flatten)]
    table: Table,
}

/// The steps of some tokens.
#[derive(Debug, Serialize)]
struct Table {
    steps: Vec<Line>,
    /// All of it, of the median repetition.
    whole_us: f64,
    /// What is in no step.
    between_us: f64,
    between_share: f64,
    /// The same tokens without a profile, as the speed above has them.
    unprofiled_us: f64,
}

/// A step in all layers that compute it alike.
#[derive(Debug, Serialize)]
struct Line {
    step: &'static str,
    kernel: String,
    rows: usize,
    /// How often it runs.
    times: usize,
    /// Bytes that it reads and writes each time.
    bytes: f64,
    /// Multiplications and additions of its products.
    flop: f64,
    /// Median of all its runs.
    median_us: f64,
    /// All its runs, of the median repetition.
    total_us: f64,
    /// Of the whole.
    share: f64,
    /// Bytes at the bandwidth, or products at the peak, whichever takes longer; None where the machine was not measured.
    limit_us: Option<f64>,
    /// Which of the two.
    limited_by: Option<&'static str>,
    /// The limit as a share of the median.
    share_of_limit: Option<f64>,
}

impl Profiles {
    /// Puts together what was timed. Error: what [`Model::explain`] refuses.
    pub fn new(
        timed: Timed,
        batches: &[Steps],
        model: &Model,
        cpu: &Cpu,
        speed: &Speed,
        machine: Option<&Machine>,
    ) -> Result<Self> {
        let plans = model.explain(cpu)?;
        let one_kernel = |kernel: &str| kernel == "persistent_decode";
        let prompt = timed.prefill.first().map_or(0, tokens_of);
        let of_texts = |steps: &Steps| {
            let (texts, profiles, unprofiled_us) = steps.profiles();
            OfTexts { texts, table: Table::new(profiles, unprofiled_us, machine) }
        };
        Ok(Self {
            decode: Table::new(&timed.decode, 1e6 / speed.decode_tokens_per_second, machine),
            prefill: Table::new(&timed.prefill, prompt as f64 * 1e6 / speed.prefill_tokens_per_second, machine),
            batches: batches.iter().map(of_texts).collect(),
            one_by_one: matches!(model.device(), Device::Cuda(_)),
            layers_are_one_kernel: plans.iter().flat_map(|p| &p.plans).any(|plan| one_kernel(plan.kernel)),
            one_kernel_needs: model.one_kernel_needs().map(ToString::to_string),
            weights_may_be_cached: model.bytes_of_step(1) < LARGEST_CACHE,
            machine: machine.copied(),
        })
    }

    /// For people.
    pub fn human(&self) -> String {
        let mut out = format!("\na token that is written, step by step\n{}", self.decode.human());
        let us = |value: f64| format!("{value:.1} µs");
        let unprofiled = us(self.decode.unprofiled_us);
        out += &match (self.one_by_one, self.layers_are_one_kernel) {
            (false, _) => format!("without a profile, as above: {unprofiled}\n"),
            (true, false) => {
                format!("kernels run one by one here, between events; recorded in one launch, as above: {unprofiled}\n")
            }
            (true, true) => format!(
                "kernels run one by one here, between events; as above, all layers are one kernel, persistent_decode, whose time \
                 events cannot divide, in one recorded launch: {unprofiled}\n"
            ),
        };
        if let Some(needed) = &self.one_kernel_needs {
            out += &format!("one kernel for all layers needs {needed}\n");
        }
        out += &format!("\na prompt, step by step\n{}", self.prefill.human());
        out += &format!("without a profile, as above: {}\n", us(self.prefill.unprofiled_us));
        for OfTexts { texts, table } in &self.batches {
            let how = if self.one_by_one { "recorded in one launch" } else { "without a profile" };
            out += &format!("\na step of {texts} texts, step by step\n{}", table.human());
            out += &format!("{how}, as above: {}\n", us(table.unprofiled_us));
        }
        if let Some(machine) = &self.machine {
            out += &format!("limits: {}\n", machine.in_words());
        }
        if self.weights_may_be_cached {
            out += "the weights may stay in a cache from step to step: steps can be faster than memory allows\n";
        }
        out
    }
}

/// Rows of all embeddings: the tokens of a profile.
fn tokens_of(profile: &Profile) -> usize {
    profile.steps.iter().filter(|step| step.name == "embedding").map(|step| step.rows).sum()
}

impl Table {
    /// Of some repetitions, at least one.
    fn new(profiles: &[Profile], unprofiled_us: f64, machine: Option<&Machine>) -> Self {
        let mut order: Vec<&Profile> = profiles.iter().collect();
        order.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let median = order.get(order.len() / 2).copied();
        let whole = median.map_or(0.0, |profile| profile.seconds);
        let all = || profiles.iter().flat_map(|profile| &profile.steps);
        // Steps that are alike, in the order in which they first run.
        let mut kinds: Vec<&TimedStep> = Vec::new();
        for step in all() {
            if !kinds.iter().any(|known| alike(known, step)) {
                kinds.push(step);
            }
        }
        let line = |kind: &&TimedStep| {
            let of_kind = |step: &&TimedStep| alike(kind, step);
            let runs: Vec<f64> = all().filter(of_kind).map(|step| step.seconds).collect();
            let in_median = || median.iter().flat_map(|profile| &profile.steps).filter(of_kind);
            let (times, total) = (in_median().count(), in_median().map(|step| step.seconds).sum::<f64>());
            let middle = Measured::of(runs).median;
            // Keys and values grow from batch to batch of a long prompt.
            let mean = |of: fn(&TimedStep) -> f64| in_median().map(of).sum::<f64>() / times.max(1) as f64;
            let (bytes, flop) = (mean(|step| step.bytes), mean(|step| step.flop));
            let limit = machine.map(|machine| limit(machine, bytes, flop));
            Line {
                step: kind.name,
                kernel: kind.kernel.clone(),
                rows: kind.rows,
                times,
                bytes,
                flop,
                median_us: 1e6 * middle,
                total_us: 1e6 * total,
                share: total / whole,
                limit_us: limit.map(|(seconds, _)| 1e6 * seconds),
                limited_by: limit.map(|(_, by)| by),
                share_of_limit: limit.map(|(seconds, _)| seconds / middle),
            }
        };
        let steps: Vec<Line> = kinds.iter().map(line).collect();
        let between = whole - steps.iter().map(|line| line.total_us * 1e-6).sum::<f64>();
        Self { steps, whole_us: 1e6 * whole, between_us: 1e6 * between, between_share: between / whole, unprofiled_us }
    }

    fn human(&self) -> String {
        let columns = [("step", Align::Left), ("kernel", Align::Left)].into_iter();
        let numbers = ["rows", "times", "bytes", "µs", "all µs", "share", "of limit"].map(|name| (name, Align::Right));
        let columns: Vec<_> = columns.chain(numbers).chain([("limit", Align::Left)]).collect();
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let us = |value: f64| format!("{value:.1}");
        let row = |line: &Line| {
            vec![
                line.step.to_owned(),
                line.kernel.clone(),
                line.rows.to_string(),
                line.times.to_string(),
                bytes(line.bytes as u64),
                us(line.median_us),
                us(line.total_us),
                percent(line.share),
                line.share_of_limit.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", 100.0 * share)),
                line.limited_by.unwrap_or("-").to_owned(),
            ]
        };
        let sum = |name: &str, value: f64, share: f64| {
            let mut row = vec![String::new(); 10];
            (row[0], row[6], row[7]) = (name.to_owned(), us(value), percent(share));
            row
        };
        let mut rows: Vec<Vec<String>> = self.steps.iter().map(row).collect();
        rows.push(sum("in no step", self.between_us, self.between_share));
        rows.push(sum("whole", self.whole_us, 1.0));
        table(&columns, &rows)
    }
}

/// Whether two steps are the same part of a layer, computed alike.
fn alike(a: &TimedStep, b: &TimedStep) -> bool {
    a.name == b.name && a.kernel == b.kernel && a.rows == b.rows
}

/// Seconds that a machine takes at least, and for what.
fn limit(machine: &Machine, bytes: f64, flop: f64) -> (f64, &'static str) {
    let moving = bytes / machine.read_bytes_per_second;
    let computing = machine.flop_per_second.map_or(0.0, |rate| flop / rate);
    if computing > moving { (computing, "compute") } else { (moving, "bytes") }
}
