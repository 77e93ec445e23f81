//! `halfbyte run --chat`: a conversation by the model's template, one line of standard input a turn.

use super::{Args, Writer, prompt};
use crate::app::App;
use crate::failure::{Exit, Failure, Result};
use crate::text::write_error;
use halfbyte_checkpoint::Weights;
use halfbyte_llm::chat::{ChatTemplate, Conversation, Message};
use halfbyte_llm::{Config, Error, Session, Spec, Tokenizer};
use std::io::{self, BufRead, IsTerminal, Read};
use std::path::Path;

/// Bytes of what is said in one turn.
const LONGEST_LINE: u64 = 1 << 20;

/// Room for a conversation, unless something else is asked for.
const CONTEXT: usize = 8192;

/// It, or what a model has; with longrope what it has without the frequencies of long texts, which conversations would have from their
/// first token on.
fn room(spec: &Spec) -> usize {
    CONTEXT.min(spec.short_context())
}

/// Talks until the input ends, or for the one turn of `--prompt`, `--file` or the last of `--messages`.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let said = prompt(args, app)?;
    let mut conversation = conversation(args)?;
    let cpu = app.cpu()?;
    let (model, tokenizer, start, laps) = args.load.start_with_tokenizer(app, &args.model)?;
    let config = model.config();
    let template = template(&args.model, config, &tokenizer)?;
    let mut end_tokens = config.eos.clone();
    end_tokens.extend(template.tokens().eos.as_deref().and_then(|token| tokenizer.id(token)));
    let longest = config.spec.max_context;
    let context = args.context.map_or(room(&config.spec), |context| context as usize);
    let mut session = Session::new(&model, &cpu, context)?;
    let max_tokens = args.max_tokens.unwrap_or(1024);
    let mut writer = Writer::new(args, app, (&model, &tokenizer), (start, laps), max_tokens);
    let waits = args.messages.is_some() && conversation.messages.last().is_some_and(|last| last.role() != "assistant");
    let no_room = |why: Error| {
        let help = match context < longest {
            true => format!("begin a new conversation, say less, or give more --context: the model takes {longest}"),
            false => "begin a new conversation, or say less: the model takes no more".to_owned(),
        };
        let exit = if said.is_some() || waits { Exit::Usage } else { Exit::Input };
        Failure::new(exit, "the conversation has no room for this turn", why.to_string(), help)
    };
    let mut answer = |said: Option<String>| {
        let before = conversation.messages.len();
        conversation.messages.extend(said.map(|said| Message::new("user", said)));
        let text = template.render(&conversation, true)?;
        // The template writes the token that begins a text, where the model wants one.
        let ids = match tokenizer.encode_within(&text, context) {
            Err(why @ (Error::ContextFull { .. } | Error::TextTooLong { .. })) => {
                conversation.messages.truncate(before);
                return Ok(Err(no_room(why)));
            }
            ids => ids?,
        };
        app.ranks().same("conversation", &format!("{} tokens", ids.len()), &ids)?;
        let answer = writer.write(&mut session, &ids, &end_tokens)?;
        conversation.push(Message::new("assistant", answer));
        Ok(Ok(()))
    };
    match &said {
        Some(said) => answer(Some(said.clone()))?,
        None if waits => answer(None)?,
        None => lines(app, args.load.tp.into(), &mut |said| answer(Some(said))),
    }
}

/// What is wrong with a file of these.
fn of_file(error: Error, what: &str) -> Failure {
    match error {
        Error::Config { path, field, expected, got } => Failure::new(
            Exit::Input,
            format!("{} holds no {what}", path.display()),
            format!("field {field}: expected {expected}, got {got}"),
            "see `halfbyte run --help` for what it may hold",
        ),
        other => other.into(),
    }
}

/// What was said before, and what the model may use.
fn conversation(args: &Args) -> Result<Conversation> {
    let mut conversation = match &args.messages {
        Some(path) => Conversation::from_file(path).map_err(|error| of_file(error, "messages"))?,
        None => Conversation::default(),
    };
    conversation.messages.extend(args.system.iter().map(|text| Message::new("system", text)));
    if let Some(path) = &args.tools {
        conversation.tools = Some(Conversation::tools_from_file(path).map_err(|error| of_file(error, "tools"))?);
    }
    Ok(conversation)
}

fn template(path: &Path, config: &Config, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
    let weights = Weights::open(path)?;
    ChatTemplate::from_weights(&weights, config, tokenizer)?.ok_or_else(|| {
        Failure::new(
            Exit::Input,
            format!("{} has no chat template", path.display()),
            "neither chat_template.jinja nor `chat_template` of tokenizer_config.json is there, nor tokenizer.chat_template in a GGUF file",
            "leave --chat out to continue a prompt, or put a chat_template.jinja into the folder",
        )
    })
}

/// Each line of the first rank's standard input that is not empty, until its end. `answer` fails, or tells of a turn that it did not take:
/// at a terminal the next one may be said then.
fn lines(app: &App, ranks: usize, answer: &mut dyn FnMut(String) -> Result<Result<()>>) -> Result<()> {
    let talks = app.ranks().share(ranks, || Ok(io::stdin().is_terminal().to_string()))? == true.to_string();
    loop {
        let line = app.ranks().share(ranks, || line(app))?;
        if line.is_empty() {
            return Ok(());
        }
        let line = line.trim_end_matches(['\n', '\r']);
        if line.trim().is_empty() {
            continue;
        }
        match answer(line.to_owned())? {
            // Told, and no reason to end.
            Err(failure) if talks => drop(failure.report(app.json())),
            taken => taken?,
        }
    }
}

/// The next line of standard input, with its end; nothing behind the last. At a terminal what is no text may be said again.
fn line(app: &App) -> Result<String> {
    let refuse = |cause: String| {
        Failure::new(Exit::Input, "cannot read standard input", cause, "each line is one turn, in UTF-8")
    };
    let terminal = io::stdin().is_terminal();
    loop {
        if terminal && !app.quiet() {
            write_error("> ");
        }
        let (mut input, mut line) = (io::stdin().lock(), Vec::new());
        let read = input.by_ref().take(LONGEST_LINE + 1).read_until(b'\n', &mut line);
        if read.map_err(|e| refuse(e.to_string()))? as u64 > LONGEST_LINE {
            return Err(refuse(format!("expected lines of at most {LONGEST_LINE} bytes, got a longer one")));
        }
        match String::from_utf8(line).map_err(|e| refuse(format!("expected UTF-8: {e}"))) {
            Err(failure) if terminal => drop(failure.report(app.json())),
            line => return line,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_have_room_as_long_as_short_frequencies_serve() {
        let config = |more: &str| {
            let text = format!(
                r#"{{"model_type": "phi3", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 4, "max_position_embeddings": 131072{more}}}"#
            );
            Config::parse(&text, Path::new("config.json")).unwrap().spec
        };
        assert_eq!(room(&config("")), 8192);
        let longrope = r#", "rope_scaling": {"type": "longrope", "short_factor": [1, 1], "long_factor": [2, 3]}"#;
        assert_eq!(room(&config(longrope)), 4096);
    }
}
