//! `halfbyte eval`: how good a model is.

mod kl;
mod logits;
mod ppl;

use crate::app::App;
use crate::args::whole;
use crate::failure::Result;
use crate::text::read_text;
use clap::Subcommand;
use halfbyte_llm::eval;
use std::path::PathBuf;

/// Measure how good a model is.
#[derive(Debug, Subcommand)]
pub enum Command {
    Ppl(ppl::Args),
    Kl(kl::Args),
    Logits(logits::Args),
}

/// The text that models read, and how it is cut.
#[derive(Debug, clap::Args)]
struct WindowArgs {
    /// The text (- for standard input): each line one document, {"text": "..."}.
    #[arg(long, value_name = "FILE.jsonl")]
    text: PathBuf,
    /// Tokens a window.
    #[arg(long, default_value_t = 512, value_name = "TOKENS")]
    window: usize,
    /// Read the first windows only.
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..))]
    max_windows: Option<u64>,
}

impl WindowArgs {
    /// The documents. Of ranks each reads its file; standard input is the first one's.
    fn documents(&self, app: &App, ranks: usize) -> Result<Vec<String>> {
        if self.text.as_os_str() != "-" {
            return Ok(eval::documents(&self.text)?);
        }
        let text = app.ranks().share(ranks, || read_text(&self.text))?;
        Ok(eval::documents_of(text.as_bytes(), &self.text)?)
    }

    /// Makes sure that all ranks read these tokens. Error: one reads others.
    fn same(&self, app: &App, tokens: &[u32]) -> Result<()> {
        app.ranks().same("text", &format!("{} tokens of {}", tokens.len(), self.text.display()), &tokens)
    }

    /// Tokens of the windows that were asked for.
    fn most_tokens(&self) -> usize {
        let windows = self.max_windows.and_then(|most| usize::try_from(most).ok());
        windows.map_or(usize::MAX, |windows| windows.saturating_mul(self.window))
    }
}

/// Runs one of them.
pub fn run(command: &Command, app: &App) -> Result<()> {
    match command {
        Command::Ppl(args) => ppl::run(args, app),
        Command::Kl(args) => kl::run(args, app),
        Command::Logits(args) => logits::run(args, app),
    }
}
