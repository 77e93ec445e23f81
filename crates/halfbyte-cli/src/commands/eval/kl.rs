//! `halfbyte eval kl`: how far a model's predictions are from another's.

use super::WindowArgs;
use crate::app::App;
use crate::failure::Result;
use crate::interrupt;
use crate::model::{LoadArgs, arch, tokenizer};
use crate::progress::{Progress, Unit};
use crate::text::several;
use halfbyte_llm::eval;
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Divergence KL(REFERENCE‖MODEL) over the documents of a file, in nats a token.
///
/// The text is cut into windows as by `eval ppl`; both models read each; every position that has a target counts. The
/// two must give the same ids to the same text.
#[derive(Debug, clap::Args)]
#[command(after_long_help = FIELDS)]
pub struct Args {
    /// Model folder.
    model: PathBuf,
    /// Folder of the model to compare with, most often the one that MODEL was quantised from; used as it is stored.
    reference: PathBuf,
    #[command(flatten)]
    windows: WindowArgs,
    #[command(flatten)]
    load: LoadArgs,
}

const FIELDS: &str = "\
Fields of the JSON object:
  kl_mean                   mean divergence over all positions, in nats
  kl_standard_error         standard error of that mean, positions taken as independent; null for a single one
  kl_median, kl_p90, kl_p99, kl_p999, kl_max
                            divergence that half, 90 %, 99 %, 99.9 % and all of the positions do not exceed
  top1_agreement            fraction of positions where both hold the same token for the most probable
  perplexity, reference_perplexity, perplexity_ratio
                            of MODEL, of REFERENCE, and the first by the second
  windows, window, tokens, positions
                            windows compared, tokens in each and in all, positions compared
  format, reference_format  of the layers of MODEL and REFERENCE
  seconds                   time it took, without loading";

#[derive(Serialize)]
struct Divergence {
    kl_mean: f64,
    kl_standard_error: Option<f64>,
    kl_median: f64,
    kl_p90: f64,
    kl_p99: f64,
    kl_p999: f64,
    kl_max: f64,
    top1_agreement: f64,
    perplexity: f64,
    reference_perplexity: f64,
    perplexity_ratio: f64,
    windows: usize,
    window: usize,
    tokens: usize,
    positions: usize,
    format: String,
    reference_format: String,
    seconds: f64,
}

/// Prints the divergence.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let cpu = app.cpu()?;
    let documents = args.windows.documents(app, args.load.tp.into())?;
    let hints = arch::of_each(args.load.hint, &[&args.model, &args.reference])?;
    let load = LoadArgs { hint: hints[0], ..args.load.clone() };
    let model = load.load(app, &args.model)?;
    let as_stored = LoadArgs { hint: hints[1], ..LoadArgs::AS_STORED };
    let reference = as_stored.load(app, &args.reference)?;
    let mut tokens = eval::shared_token_stream(
        (&tokenizer(&args.model)?, model.config().bos),
        (&tokenizer(&args.reference)?, reference.config().bos),
        &documents,
    )?;
    tokens.truncate(args.windows.most_tokens());
    args.windows.same(app, &tokens)?;
    let progress = Progress::new(app, "comparing", Unit::Things("windows"));
    let cooperate = interrupt::cooperate();
    let found = eval::kl_divergence(&model, &reference, &cpu, &tokens, args.windows.window, &mut |at| {
        progress.at(at.done as u64, at.total as u64);
        if interrupt::cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    drop((cooperate, progress));
    let result = Divergence {
        kl_mean: found.mean,
        kl_standard_error: found.standard_error,
        kl_median: found.median,
        kl_p90: found.p90,
        kl_p99: found.p99,
        kl_p999: found.p999,
        kl_max: found.max,
        top1_agreement: found.top1_agreement,
        perplexity: found.perplexity,
        reference_perplexity: found.reference_perplexity,
        perplexity_ratio: found.perplexity_ratio(),
        windows: found.windows,
        window: args.windows.window,
        tokens: found.tokens,
        positions: found.positions,
        format: load.name(&args.model)?,
        reference_format: as_stored.name(&args.reference)?,
        seconds: found.seconds,
    };
    app.result(&result, |r| {
        let error = r.kl_standard_error.map_or(String::new(), |error| format!(" ± {error:.6}"));
        format!(
            "KL divergence {:.6}{error} nats a token ({} from {}), top-1 agreement {:.2} %\n\
             half of {} positions at most {:.6}, 90 % {:.6}, 99 % {:.6}, 99.9 % {:.6}, all {:.6}\n\
             perplexity {:.4} for {:.4}, ratio {:.5}, {} of {} tokens, {:.1} s\n",
            r.kl_mean,
            r.format,
            r.reference_format,
            100.0 * r.top1_agreement,
            r.positions,
            r.kl_median,
            r.kl_p90,
            r.kl_p99,
            r.kl_p999,
            r.kl_max,
            r.perplexity,
            r.reference_perplexity,
            r.perplexity_ratio,
            several(r.windows, "window"),
            r.window,
            r.seconds
        )
    })
}
