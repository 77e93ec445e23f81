//! The halfbyte command line: quantise, inspect, run and measure language models on int weights.
//!
//! One file a subcommand in `commands`; the rest is what they share. Results go to standard output, as text or as one
//! JSON object; progress, notes and errors to standard error.
#![forbid(unsafe_code)]

mod app;
mod args;
mod commands;
mod escape;
mod failure;
mod interrupt;
mod machine;
mod model;
mod progress;
mod random;
mod ranks;
mod side_file;
mod start;
mod text;
mod timing;
mod usage;

use app::App;
use args::Common;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use commands::{
    bench, completions, convert, demo, dequantize, doctor, eval, explain, inspect, quantize, run, serve, verify,
};
use failure::{Failure, Result};
use ranks::Given;
use std::process::ExitCode;

/// Int weights for language models: quantise, inspect, run, measure.
#[derive(Debug, Parser)]
#[command(name = "halfbyte", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit status: 0 done; 1 the answer is \"no\" (verify differs, a bound is missed); 2 wrong usage; 3 bad input file; \
                        4 device, memory or output; 130 interrupted."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    Inspect(inspect::Args),
    Quantize(quantize::Args),
    Convert(convert::Args),
    Dequantize(dequantize::Args),
    Verify(verify::Args),
    Run(run::Args),
    Serve(Box<serve::Args>),
    #[command(subcommand)]
    Eval(eval::Command),
    #[command(subcommand)]
    Bench(bench::Command),
    Explain(explain::Args),
    Doctor(doctor::Args),
    Completions(completions::Args),
}

impl Command {
    /// Whether it heeds `--device`.
    fn takes_gpus(&self) -> bool {
        use bench::Command::{Conv, Experts, Launch, Matmul, Model, Models, Ranks};
        let models =
            matches!(self, Self::Demo(_) | Self::Run(_) | Self::Serve(_) | Self::Eval(_) | Self::Bench(Model(_)));
        models
            || matches!(
                self,
                Self::Bench(Conv(_) | Experts(_) | Launch(_) | Matmul(_) | Models(_) | Ranks(_)) | Self::Explain(_)
            )
    }
}

/// The program's arguments. A server is one process, and shows no option that it refuses.
fn command() -> clap::Command {
    let command = Cli::command().mut_subcommand("serve", |serve| serve.mut_arg("tp", |tp| tp.hide(true)));
    usage::with_negative_numbers(command)
}

fn main() -> ExitCode {
    let mut command = command();
    let words: Vec<_> = std::env::args_os().collect();
    let parsed = command.try_get_matches_from_mut(&words).or_else(|error| {
        let others = usage::without_help_of_help(&error, &words).ok_or(error)?;
        command.try_get_matches_from_mut(others)
    });
    let parsed = parsed.and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, Given::of(&command, &matches))));
    let (cli, given) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            command.build();
            return usage::report(&error, &command);
        }
    };
    let json = cli.common.json;
    match dispatch(cli, given) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(json),
    }
}

fn dispatch(cli: Cli, given: Given) -> Result<()> {
    interrupt::refuse_large_files().map_err(|e| Failure::device("cannot block a signal", e.to_string()))?;
    // Before the work and not behind it: results name the places that they are of.
    if cli.common.json && std::env::args_os().any(|given| given.to_str().is_none()) {
        let what = "an argument is not UTF-8, which --json cannot tell";
        return Err(Failure::usage(what, "JSON is text of whole characters", "leave --json out, or give another name"));
    }
    let app = App::new(cli.common, given)?;
    interrupt::install(!matches!(cli.command, Command::Run(_)))
        .map_err(|e| Failure::device("cannot listen for Ctrl-C", e.to_string()))?;
    if !cli.command.takes_gpus() {
        app.cpu_only()?;
    }
    let done = match cli.command {
        Command::Demo(args) => demo::run(&args, &app),
        Command::Inspect(args) => inspect::run(&args, &app),
        Command::Quantize(args) => quantize::run(&args, &app),
        Command::Convert(args) => convert::run(&args, &app),
        Command::Verify(args) => verify::run(&args, &app),
        Command::Dequantize(args) => dequantize::run(&args, &app),
        Command::Run(args) => run::run(&args, &app),
        Command::Serve(args) => serve::run(&args, &app),
        Command::Eval(command) => eval::run(&command, &app),
        Command::Bench(command) => bench::run(&command, &app),
        Command::Explain(args) => explain::run(&args, &app),
        Command::Doctor(args) => doctor::run(&args, &app),
        Command::Completions(args) => completions::run(&args, &app),
    };
    done.map_err(|failure| app.ranks().explain(failure))
}
