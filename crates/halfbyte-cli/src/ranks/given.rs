//! The command line as all ranks must have been given it.

use clap::{ArgMatches, Command};
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};

/// What ranks may have been given differently: where they compute, what they show, and where they write.
const OWN: [&str; 7] = ["device", "json", "output", "overwrite", "quiet", "stream", "threads"];

/// Places, which may be others on another host: what lies there is compared when it is read.
const PLACES: [&str; 8] = ["file", "ids", "messages", "model", "prompts", "reference", "text", "tools"];

/// Characters of a value that are shown.
const LONGEST_VALUE: usize = 60;

/// A command with every option of it, those that were left out by what they are then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Given {
    verb: String,
    options: Vec<(String, Option<String>)>,
}

impl Given {
    /// What this process was given.
    pub fn of(command: &Command, matches: &ArgMatches) -> Self {
        let (mut command, mut matches, mut verb) = (command, matches, Vec::new());
        while let Some((name, inner)) = matches.subcommand() {
            let Some(of_name) = command.find_subcommand(name) else { break };
            (command, matches) = (of_name, inner);
            verb.push(name);
        }
        let options = command.get_arguments().filter(|arg| !OWN.contains(&arg.get_id().as_str())).map(|arg| {
            let id = arg.get_id().as_str();
            let name = arg.get_long().map_or_else(|| id.to_uppercase(), |long| format!("--{long}"));
            let values = matches.try_get_raw(id).ok().flatten();
            let value = values.map(|all| match PLACES.contains(&id) {
                true => "true".to_owned(),
                false => all.map(|value| plain(&value.to_string_lossy())).collect::<Vec<_>>().join(", "),
            });
            (name, value)
        });
        Self { verb: verb.join(" "), options: options.collect() }
    }

    /// What ranks tell each other.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Texts and nothing else: this does not fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What a rank was given otherwise than the first, from what both told.
    pub fn difference(first: &[u8], rank: usize, other: &[u8]) -> String {
        let read = |bytes: &[u8]| serde_json::from_slice::<Self>(bytes).unwrap_or_default();
        let (first, other) = (read(first), read(other));
        if first.verb != other.verb {
            return format!("rank {rank} runs `{}`, rank 0 `{}`", other.verb, first.verb);
        }
        let both = first.options.iter().zip(&other.options);
        let different = both.filter(|(first, other)| first != other).map(|((name, first), (_, other))| {
            format!("rank {rank} has {}, rank 0 {}", told(name, other.as_deref()), told(name, first.as_deref()))
        });
        let all: Vec<String> = different.collect();
        if all.is_empty() { format!("rank {rank} is another version of the program") } else { all.join("; ") }
    }
}

/// A number in one spelling; a text that is longer than what is shown with a digest.
fn plain(value: &str) -> String {
    if let Ok(number) = value.parse::<i128>() {
        return number.to_string();
    }
    if let Ok(number) = value.parse::<f64>() {
        return number.to_string();
    }
    match value.char_indices().nth(LONGEST_VALUE) {
        None => value.to_owned(),
        Some((at, _)) => {
            let mut hash = DefaultHasher::new();
            value.hash(&mut hash);
            format!("{}... ({} bytes, digest {:016x})", &value[..at], value.len(), hash.finish())
        }
    }
}

/// An option as it was given.
fn told(name: &str, value: Option<&str>) -> String {
    match value {
        None | Some("false") => format!("no {name}"),
        Some("true") => name.to_owned(),
        Some(value) => format!("{name} {value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command;

    fn given(line: &str) -> Given {
        let mut command = command();
        let matches = command.try_get_matches_from_mut(line.split_whitespace()).unwrap();
        Given::of(&command, &matches)
    }

    #[test]
    fn what_steers_the_steps_is_compared_and_nothing_else() {
        let first = given("halfbyte run m -p x --tp 2 --seed 0 --temperature 1.0");
        for same in [
            "run other/m -p x --tp 2 --temperature 1 --threads 3 -q --device cpu",
            "run m -px --temperature 1.00 --tp 2",
        ] {
            assert_eq!(given(&format!("halfbyte {same}")), first, "{same}");
        }
        let different = |line: &str| {
            let other = given(&format!("halfbyte {line}"));
            Given::difference(&first.to_bytes(), 3, &other.to_bytes())
        };
        let same = "run m --tp 2 --temperature 1";
        for (more, what) in [
            ("-p x --seed 2", "rank 3 has --seed 2, rank 0 --seed 0"),
            ("-p y", "rank 3 has --prompt y, rank 0 --prompt x"),
            ("-f x", "rank 3 has no --prompt, rank 0 --prompt x; rank 3 has --file, rank 0 no --file"),
            ("-p x -n 3", "rank 3 has --max-tokens 3, rank 0 no --max-tokens"),
            ("-p x --stop a --stop b", "rank 3 has --stop a, b, rank 0 no --stop"),
            ("-p x --kv int8", "rank 3 has --kv int8, rank 0 no --kv"),
        ] {
            assert_eq!(different(&format!("{same} {more}")), what);
        }
        assert_eq!(different("eval ppl m --text t --tp 2"), "rank 3 runs `eval ppl`, rank 0 `run`");
        let long = |end: &str| given(&format!("halfbyte run m --tp 2 -p {}{end}", "x".repeat(70)));
        let what = Given::difference(&long("a").to_bytes(), 1, &long("b").to_bytes());
        assert!(what.contains("(71 bytes, digest ") && what.len() < 300, "{what}");
    }

    /// A name that no command has would be a comparison that is left out.
    #[test]
    fn every_name_that_is_not_compared_exists() {
        fn names(command: &Command, all: &mut Vec<String>) {
            all.extend(command.get_arguments().map(|arg| arg.get_id().to_string()));
            command.get_subcommands().for_each(|inner| names(inner, all));
        }
        let mut all = Vec::new();
        names(&command(), &mut all);
        for name in OWN.iter().chain(&PLACES) {
            assert!(all.iter().any(|known| known == name), "{name}");
        }
    }
}
