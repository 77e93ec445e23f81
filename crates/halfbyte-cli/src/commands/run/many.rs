//! `halfbyte run --prompts`: many texts at once, one a line.

use super::{Args, report};
use crate::app::App;
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::text::{rate, read_text, several};
use halfbyte::cpu::attention::PAGE_LENGTH;
use halfbyte_llm::Error;
use halfbyte_llm::schedule::{Handle, Options, Queue, Request, Scheduler};
use serde::Serialize;
use std::path::Path;
use std::thread::Builder;
use std::time::Instant;

/// Tokens of a text that are written ahead of what is printed.
const UNREAD: usize = 4096;

#[derive(Serialize)]
struct Text {
    /// Of the prompt's line, from 0.
    index: usize,
    text: String,
    tokens: Vec<u32>,
    finish: &'static str,
    prompt_tokens: usize,
}

/// Writes one text for each prompt, in their order.
pub fn run(args: &Args, file: &Path, app: &App) -> Result<()> {
    let ranks = args.load.tp.into();
    let prompts = app.ranks().share(ranks, || read_text(file))?;
    let cpu = app.cpu()?;
    let (model, tokenizer, _, _) = args.load.start_with_tokenizer(app, &args.model)?;
    let config = model.config();
    let max_tokens = args.max_tokens.unwrap_or(128);
    let limit = config.spec.max_context;
    let encode = |(at, prompt): (usize, &str)| {
        tokenizer.encode_prompt_within(prompt, config.bos, limit).map_err(|e| of_line(file, at, e))
    };
    let prompts = prompts.lines().enumerate().map(encode).collect::<Result<Vec<Vec<u32>>>>()?;
    app.ranks().same("prompts", &format!("{} texts", prompts.len()), &prompts)?;
    if let Some(line) = prompts.iter().position(Vec::is_empty) {
        return Err(Failure::new(
            Exit::Input,
            format!("line {} of {} is empty", line + 1, file.display()),
            "the model has no token that texts begin with, so nothing can be continued",
            "remove the line, or write something there",
        ));
    }
    let texts = args.parallel.unwrap_or(16) as usize;
    let of_text = |prompt: &Vec<u32>| prompt.len().saturating_add(max_tokens).min(limit).next_multiple_of(PAGE_LENGTH);
    // Room for the largest of them, unless less is asked for.
    let needed =
        prompts.iter().map(of_text).max().unwrap_or(PAGE_LENGTH).saturating_mul(texts.min(prompts.len().max(1)));
    let positions = args.positions.map_or(needed, |positions| positions as usize);
    // Of ranks none waits for what is printed: all make the same steps.
    let unread = if ranks > 1 { usize::MAX } else { UNREAD };
    let options =
        Options { positions, texts, unread, batch_invariant: args.batch_invariant, ..Options::on(model.device()) };
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options)?;
    let begun = Instant::now();
    let cooperate = interrupt::cooperate();
    let written = std::thread::scope(|scope| {
        let handles = submit(args, file, queue, prompts, &config.eos, max_tokens)?;
        let writing = Builder::new().spawn_scoped(scope, move || scheduler.run());
        let writing = writing.map_err(|e| Failure::device("cannot start a thread", e.to_string()))?;
        let mut written = 0;
        let mut ended = Ok(());
        for (index, (mut handle, prompt_tokens)) in handles.into_iter().enumerate() {
            match text(index, &mut handle, prompt_tokens, &tokenizer) {
                // All handles go, and with them what is being written.
                Ok(None) => return Err(Failure::interrupted()),
                Ok(Some(text)) => {
                    written += text.tokens.len();
                    app.result(&text, |text| format!("{}\n", in_a_line(&text.text)))?;
                }
                // Why it ended is told by who wrote.
                Err(error @ Error::Stopped) => {
                    ended = Err(error);
                    break;
                }
                Err(error) => return Err(error.into()),
            }
            if interrupt::cancelled() {
                return Err(Failure::interrupted());
            }
        }
        writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<usize, Failure>(ended.map(|()| written)?)
    })?;
    drop(cooperate);
    let speed = report::speed(written, begun.elapsed());
    app.note(&format!("{} written, {} tok/s, prompts read meanwhile", several(written, "token"), rate(speed)));
    Ok(())
}

/// A text as one line: line breaks are \n and \r, and backslashes are two.
fn in_a_line(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r")
}

/// What is wrong with the prompt of a line, from 0.
fn of_line(file: &Path, at: usize, error: Error) -> Failure {
    match error {
        Error::ContextFull { .. } | Error::TextTooLong { .. } => Failure::usage(
            format!("line {} of {} has more tokens than there is room for", at + 1, file.display()),
            error.to_string(),
            "shorten the line, or give more --positions; max_position_embeddings in config.json is the limit",
        ),
        other => other.into(),
    }
}

fn submit(
    args: &Args,
    file: &Path,
    queue: Queue,
    prompts: Vec<Vec<u32>>,
    eos: &[u32],
    max_tokens: usize,
) -> Result<Vec<(Handle, usize)>> {
    let submit = |(at, prompt): (usize, Vec<u32>)| {
        let prompt_tokens = prompt.len();
        let request = Request { prompt, max_tokens, sampling: args.sampling.into(), end_tokens: eos.to_vec() };
        let handle = queue.submit(request).map_err(|e| of_line(file, at, e))?;
        Ok((handle, prompt_tokens))
    };
    prompts.into_iter().enumerate().map(submit).collect()
}

/// All of a text; None: an interrupt came before its end.
fn text(
    index: usize,
    handle: &mut Handle,
    prompt_tokens: usize,
    tokenizer: &halfbyte_llm::Tokenizer,
) -> halfbyte_llm::Result<Option<Text>> {
    let mut tokens = Vec::new();
    for token in handle.by_ref() {
        tokens.push(token?);
        if interrupt::cancelled() {
            return Ok(None);
        }
    }
    let finish = handle.finish().map_or("cancelled", report::name);
    Ok(Some(Text { index, text: tokenizer.decode(&tokens)?, tokens, finish, prompt_tokens }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_one_line_for_every_reader() {
        assert_eq!(in_a_line("a\r\nb\\n\rc"), "a\\r\\nb\\\\n\\rc");
    }
}
