//! `halfbyte bench`: how fast this machine is with it.

mod case;
mod check;
mod conv;
mod experts;
mod launch;
mod limits;
mod load;
mod matmul;
pub mod model;
mod models;
mod ranks;
mod replays;
mod report;
mod serve;
mod source;

use crate::app::App;
use crate::failure::Result;
use clap::Subcommand;

/// Measure speed.
#[derive(Debug, Subcommand)]
pub enum Command {
    Conv(conv::Args),
    Experts(experts::Args),
    Launch(launch::Args),
    Load(load::Args),
    Matmul(matmul::Args),
    Model(model::Args),
    Models(models::Args),
    Ranks(ranks::Args),
    Serve(serve::Args),
}

/// Runs one of them.
pub fn run(command: &Command, app: &App) -> Result<()> {
    match command {
        Command::Conv(args) => conv::run(args, app),
        Command::Experts(args) => experts::run(args, app),
        Command::Launch(args) => launch::run(args, app),
        Command::Load(args) => load::run(args, app),
        Command::Matmul(args) => matmul::run(args, app),
        Command::Model(args) => model::run(args, app),
        Command::Models(args) => models::run(args, app),
        Command::Ranks(args) => ranks::run(args, app),
        Command::Serve(args) => serve::run(args, app),
    }
}
