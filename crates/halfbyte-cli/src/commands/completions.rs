//! `halfbyte completions`: a script that teaches a shell the options.

use crate::Cli;
use crate::app::App;
use crate::failure::Result;
use clap::CommandFactory;
use clap_complete::Shell;
use serde::Serialize;

/// Print a completion script for a shell.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Serialize)]
struct Completions {
    shell: String,
    script: String,
}

/// Prints the script.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "halfbyte", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    app.result(&Completions { shell: args.shell.to_string(), script }, |c| c.script.clone())
}
