//! What is wrong with a command line, in this program's form.

use crate::failure::{Exit, Failure};
use crate::text::{write_error, write_output};
use clap::error::{ContextKind, ContextValue, ErrorKind as Kind};
use clap::{Arg, Command, Error};
use std::error::Error as _;
use std::ffi::OsString;
use std::fmt::Write;
use std::net::AddrParseError;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::process::ExitCode;

/// A command whose options take negative numbers as values, and refuse them as such: what begins with a dash is an option else.
pub fn with_negative_numbers(command: Command) -> Command {
    let numbers = |arg: Arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(numbers).mut_subcommands(with_negative_numbers)
}

/// A command line in which help was asked for the command `help`, without that: it has nothing else to say.
pub fn without_help_of_help(error: &Error, words: &[OsString]) -> Option<Vec<OsString>> {
    let is_flag = |word: &str| word == "--help" || word == "-h";
    let asked =
        error.kind() == Kind::InvalidSubcommand && text(error, ContextKind::InvalidSubcommand).is_some_and(is_flag);
    asked.then(|| words.iter().filter(|word| !word.to_str().is_some_and(is_flag)).cloned().collect())
}

/// Prints what clap has to say: help and version to standard output, errors in this program's form.
pub fn report(error: &Error, command: &Command) -> ExitCode {
    let rendered = error.render().to_string();
    match error.kind() {
        Kind::DisplayHelp | Kind::DisplayVersion => match write_output(&rendered) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => failure.report(false),
        },
        Kind::DisplayHelpOnMissingArgumentOrSubcommand => {
            write_error(&rendered);
            ExitCode::from(Exit::Usage as u8)
        }
        _ => {
            let cause = of_value(error, command).unwrap_or_else(|| in_a_line(&rendered));
            let help = format!("`{} --help` lists what there is", given_verbs(command).0);
            let json = std::env::args_os().any(|word| word == "--json");
            Failure::usage("wrong usage", cause, help).report(json)
        }
    }
}

/// What clap says, but for the usage behind it.
fn in_a_line(rendered: &str) -> String {
    let mut cause = String::new();
    for line in rendered.lines().map(str::trim) {
        let line = line.strip_prefix("error: ").unwrap_or(line);
        if line.starts_with("Usage:") || line.starts_with("For more information") {
            break;
        }
        // A number with a sign is no name of a file.
        let of_number =
            line.strip_prefix("tip: to pass '-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        if !line.is_empty() && !of_number {
            // A String takes everything.
            let between = if cause.is_empty() {
                ""
            } else if cause.ends_with(':') {
                " "
            } else {
                "; "
            };
            let _ = write!(cause, "{between}{line}");
        }
    }
    cause
}

fn text(error: &Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    }
}

/// What is wrong with a value: of which option or variable it is, and what is expected. None where nothing better is known than what
/// clap says.
fn of_value(error: &Error, command: &Command) -> Option<String> {
    let (name, value) = (text(error, ContextKind::InvalidArg)?, text(error, ContextKind::InvalidValue)?);
    let expected = match (error.kind(), error.get(ContextKind::ValidValue)) {
        (Kind::ValueValidation, _) => expected(error.source()?),
        (Kind::InvalidValue, Some(ContextValue::Strings(known))) if !value.is_empty() && !known.is_empty() => {
            format!("expected one of {}", known.join(", "))
        }
        _ => return None,
    };
    let arg = given_verbs(command).1.get_arguments().find(|arg| arg.to_string() == name);
    let variable = arg.and_then(|arg| of_environment(arg, value));
    Some(match variable {
        Some(variable) => {
            format!("invalid value '{value}' for {variable} in the environment, which is '{name}': {expected}")
        }
        None => format!("invalid value '{value}' for '{name}': {expected}"),
    })
}

/// The variable that a value comes from.
fn of_environment<'a>(arg: &'a Arg, value: &str) -> Option<&'a str> {
    let variable = arg.get_env()?.to_str()?;
    let from_there = std::env::var(variable).is_ok_and(|all| all == value || all.split(',').any(|one| one == value));
    let long = format!("--{}", arg.get_long()?);
    let is_given = |word: &str| word.strip_prefix(&long).is_some_and(|rest| rest.is_empty() || rest.starts_with('='));
    let given = std::env::args_os().any(|word| word.to_str().is_some_and(is_given));
    (from_there && !given).then_some(variable)
}

/// What a value should have been.
fn expected(why: &(dyn std::error::Error + 'static)) -> String {
    if why.is::<ParseFloatError>() {
        return "expected a number".to_owned();
    }
    if why.is::<AddrParseError>() {
        return "expected an IP address, as 127.0.0.1".to_owned();
    }
    match why.downcast_ref::<ParseIntError>().map(ParseIntError::kind) {
        Some(IntErrorKind::PosOverflow) => "expected a smaller number".to_owned(),
        Some(_) => "expected a whole number, 0 or more".to_owned(),
        None => why.to_string(),
    }
}

/// The program with the subcommands that were named on the command line, and the last of these.
fn given_verbs(command: &Command) -> (String, &Command) {
    let mut verbs = "halfbyte".to_owned();
    let mut at = command;
    for word in std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()) {
        match at.find_subcommand(&word) {
            // What is behind it is of the command before.
            Some(_) if word == "help" => {}
            Some(inner) => {
                verbs = format!("{verbs} {word}");
                at = inner;
            }
            None if word.starts_with('-') && at.get_name() == command.get_name() => {}
            None => break,
        }
    }
    (verbs, at)
}
