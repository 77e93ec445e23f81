//! `halfbyte eval`: how good a model is.

mod kl;
mod logits;
mod ppl;

use crate::app::App;
use crate::failure::Result;
use clap::Subcommand;

/// Measure how good a model is.
#[derive(Debug, Subcommand)]
pub enum Command {
    Ppl(ppl::Args),
    Kl(kl::Args),
    Logits(logits::Args),
}

/// Runs one of them.
pub fn run(command: &Command, app: &App) -> Result<()> {
    match command {
        Command::Ppl(args) => ppl::run(args, app),
        Command::Kl(args) => kl::run(args, app),
        Command::Logits(args) => logits::run(args, app),
    }
}
