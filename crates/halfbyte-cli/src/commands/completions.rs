//! `halfbyte completions`: a script that teaches a shell the options.

use crate::Cli;
use crate::app::App;
use crate::failure::Result;
use crate::text::write_output;
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
    if !app.json() {
        // For a shell, and all of it ours.
        return write_output(&script);
    }
    app.result(&Completions { shell: args.shell.to_string(), script }, |_| String::new())
}
