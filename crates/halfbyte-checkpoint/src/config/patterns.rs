//! Lists of module names in a config, with regular expressions among them.

use regex::{Regex, RegexBuilder};
use serde::{Serialize, Serializer};
use std::collections::HashMap;

/// Expressions of a list that are compiled; a list of names has no such limit.
pub(super) const MAX_EXPRESSIONS: usize = 1024;
/// Bytes that one of them may take compiled. Counted repetitions can ask for any amount.
const MAX_COMPILED_BYTES: usize = 1 << 17;

/// Modules that a config lists: by name, or by regular expression.
///
/// Expressions are tried at the start of a name and need not reach its end, as Python's `re.match` does it. They are run
/// in linear time, so that look-around and references back are not read; [`unread`](Self::unread) has those.
#[derive(Clone, Debug, Default)]
pub struct ModulePatterns {
    texts: Vec<String>,
    /// Names without anything special in them, which need no expression: the first entry that is the whole name, and
    /// the first that a name may start with.
    literals: HashMap<String, [Option<usize>; 2]>,
    /// Names that stand for everything that has them among its parts or at its end, each with its first entry.
    parts: HashMap<String, usize>,
    expressions: Vec<(usize, Regex)>,
    unread: Vec<(usize, String)>,
    /// The first name of a class.
    class: Option<usize>,
}

/// The longest name that is looked for in others, and that others are looked for in.
const MAX_NAME_BYTES: usize = 1024;

/// How an entry of a list is meant.
pub(super) enum Meaning<'a> {
    /// The whole name.
    Name(&'a str),
    /// An expression for the start of the name.
    Expression(&'a str),
    /// Parts of the name, or its end, or an expression for its first parts, as transformers skips modules.
    Parts(&'a str),
    /// The whole name, with `*` for anything and `?` for any character, as Python's `fnmatch` does it.
    Wildcards(&'a str),
}

impl ModulePatterns {
    /// The entries as the config has them, each with its meaning.
    pub(super) fn new(texts: Vec<String>, meaning: impl Fn(&str) -> Meaning<'_>) -> Self {
        let mut this = Self::default();
        for (at, text) in texts.iter().enumerate() {
            match meaning(text) {
                Meaning::Name(name) => this.add_literal(at, name, WHOLE),
                Meaning::Expression(expression) => match literal(expression) {
                    Some((name, kind)) if name.len() <= MAX_NAME_BYTES => this.add_literal(at, &name, kind),
                    _ => this.add_expression(at, expression),
                },
                Meaning::Wildcards(text) => {
                    let wild = |c: char| match c {
                        '*' => ".*".to_owned(),
                        '?' => ".".to_owned(),
                        c => regex::escape(c.encode_utf8(&mut [0; 4])),
                    };
                    this.add_expression(at, &format!("(?s:{})$", text.chars().map(wild).collect::<String>()));
                }
                Meaning::Parts(name) => {
                    this.parts.entry(name.to_owned()).or_insert(at);
                    if name.contains(|c: char| !c.is_alphanumeric() && !"._-".contains(c)) {
                        this.add_expression(at, &format!("(?:{name})(?:\\.|$)"));
                    }
                }
            }
        }
        // Python's classes begin with a capital; its modules do not.
        this.class = texts.iter().position(|text| text.starts_with(|c: char| c.is_ascii_uppercase()));
        this.texts = texts;
        this
    }

    fn add_literal(&mut self, at: usize, name: &str, kind: usize) {
        self.literals.entry(name.to_owned()).or_default()[kind].get_or_insert(at);
    }

    fn add_expression(&mut self, at: usize, expression: &str) {
        if self.expressions.len() == MAX_EXPRESSIONS {
            self.unread.push((at, format!("more than {MAX_EXPRESSIONS} expressions")));
            return;
        }
        match RegexBuilder::new(expression).size_limit(MAX_COMPILED_BYTES).dfa_size_limit(MAX_COMPILED_BYTES).build() {
            Ok(regex) => self.expressions.push((at, regex)),
            // The last line has the reason; those before it draw where.
            Err(e) => {
                let reason = e.to_string();
                let reason = reason.lines().last().unwrap_or_default();
                self.unread.push((at, reason.trim_start_matches("error: ").to_owned()));
            }
        }
    }

    /// Place of the first entry that takes in this module.
    pub fn first(&self, name: &str) -> Option<usize> {
        let known = self.first_literal(name).into_iter().chain(self.first_part(name)).min();
        // An expression that matches at the start at all is found there, as the leftmost match.
        let expression = self
            .expressions
            .iter()
            .take_while(|(at, _)| known.is_none_or(|known| *at < known))
            .find(|(_, regex)| regex.find(name).is_some_and(|found| found.start() == 0));
        expression.map(|(at, _)| *at).or(known)
    }

    fn first_literal(&self, name: &str) -> Option<usize> {
        if self.literals.is_empty() {
            return None;
        }
        let whole = self.literals.get(name).and_then(|found| found[WHOLE]);
        let starts = cuts(name).filter_map(|end| self.literals.get(&name[..end])?[START]);
        starts.chain(whole).min()
    }

    fn first_part(&self, name: &str) -> Option<usize> {
        if self.parts.is_empty() || name.len() > MAX_NAME_BYTES {
            return None;
        }
        let ends = cuts(name).filter(|&start| start < name.len()).filter_map(|start| self.parts.get(&name[start..]));
        // Runs of whole parts that do not reach the end.
        let dots = || name.match_indices('.').map(|(dot, _)| dot);
        let starts = std::iter::once(0).chain(dots().map(|dot| dot + 1));
        let runs = starts
            .flat_map(|start| dots().filter(move |&end| end > start).map(move |end| &name[start..end]))
            .filter_map(|run| self.parts.get(run));
        ends.chain(runs).min().copied()
    }

    /// The first entry that takes in this module.
    pub fn matching(&self, name: &str) -> Option<&str> {
        self.first(name).map(|at| self.texts[at].as_str())
    }

    /// Whether the list has this very name.
    pub fn names(&self, name: &str) -> bool {
        self.literals.get(name).is_some_and(|found| found[WHOLE].is_some())
    }

    /// The first entry that is the name of a class, such as `Linear`.
    pub fn class(&self) -> Option<&str> {
        self.class.map(|at| self.texts[at].as_str())
    }

    /// The entries as the config has them.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Expressions that are not read, each with the reason; they take in nothing.
    pub fn unread(&self) -> impl Iterator<Item = (&str, &str)> {
        self.unread.iter().map(|(at, why)| (self.texts[*at].as_str(), why.as_str()))
    }

    /// Number of expressions that are compiled.
    pub(super) fn compiled(&self) -> usize {
        self.expressions.len()
    }

    /// Place of the first expression that is not read.
    pub(super) fn first_unread(&self) -> Option<usize> {
        self.unread.first().map(|(at, _)| *at)
    }
}

/// Where a name can be cut in two, up to the longest start that is looked for.
fn cuts(name: &str) -> impl Iterator<Item = usize> {
    (0..=name.len().min(MAX_NAME_BYTES)).filter(|&at| name.is_char_boundary(at))
}

const WHOLE: usize = 0;
const START: usize = 1;

/// What an expression stands for that has nothing special in it but a `^` before and a `$` after it, as programs write
/// that mean single modules.
fn literal(expression: &str) -> Option<(String, usize)> {
    let mut name = String::with_capacity(expression.len());
    let mut chars = expression.strip_prefix('^').unwrap_or(expression).chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => name.push(chars.next().filter(char::is_ascii_punctuation)?),
            '$' if chars.as_str().is_empty() => return Some((name, WHOLE)),
            '.' | '+' | '*' | '?' | '(' | ')' | '[' | ']' | '{' | '}' | '|' | '^' | '$' => return None,
            c => name.push(c),
        }
    }
    Some((name, START))
}

/// Two lists are equal if they were written equally.
impl PartialEq for ModulePatterns {
    fn eq(&self, other: &Self) -> bool {
        self.texts == other.texts
    }
}

impl Eq for ModulePatterns {}

impl Serialize for ModulePatterns {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.texts.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expressions(texts: &[&str]) -> ModulePatterns {
        ModulePatterns::new(texts.iter().map(|&t| t.to_owned()).collect(), |text| Meaning::Expression(text))
    }

    #[test]
    fn expressions_match_at_the_start_only() {
        // Each with what Python's re.match says.
        let cases = [
            (".*k_proj", "model.layers.0.k_proj", true),
            ("k_proj", "model.layers.0.k_proj", false),
            ("model", "model.layers.0.k_proj", true),
            ("^model$", "model.layers", false),
            (r"model\.layers\.1", "model.layers.10.x", true),
            (r"model\.layers\.1$", "model.layers.10", false),
            (r"model.layers.\d+.mlp", "model.layers.12.mlp.up_proj", true),
            ("b|a", "ab", true),
            ("b|c", "ab", false),
            ("(?i)LM_HEAD", "lm_head", true),
            ("", "anything", true),
            ("$", "anything", false),
            ("modell", "model", false),
        ];
        for (expression, name, expected) in cases {
            let patterns = expressions(&[expression]);
            assert_eq!(patterns.matching(name), expected.then_some(expression), "{expression} on {name}");
            assert_eq!(patterns.unread().count(), 0);
        }
    }

    #[test]
    fn the_first_entry_that_matches_is_taken_whatever_its_kind() {
        let patterns = expressions(&[r"^a\.b$", "a.*c", r"a\.b", "a"]);
        assert_eq!(
            ["a.b", "a.b.c", "a.b.d", "ax", "b"].map(|name| patterns.first(name)),
            [Some(0), Some(1), Some(2), Some(3), None]
        );
        assert!(patterns.names("a.b") && !patterns.names("a"));
    }

    #[test]
    fn expressions_that_are_not_read_are_kept_with_the_reason() {
        let repeated = r"\w{1000}{1000}".to_owned();
        let patterns = expressions(&["(?!x)y", "(", r"(a)\1", &repeated, "y"]);
        assert_eq!(patterns.first("y"), Some(4));
        let unread: Vec<(&str, &str)> = patterns.unread().collect();
        assert_eq!(unread.len(), 4, "{unread:?}");
        for ((_, why), part) in unread.iter().zip(["look-around", "unclosed", "backreferences", "size limit"]) {
            assert!(why.contains(part), "{why}");
        }
        for w in [r"\w+", r"model\.layers\.\d+\.\w+\.\w+_proj", "(?i).*[a-z]{1,64}_proj$"] {
            assert_eq!(expressions(&[w]).unread().next(), None);
        }
        let many: Vec<String> = (0..MAX_EXPRESSIONS + 2).map(|i| format!("a.{i}")).collect();
        let patterns = ModulePatterns::new(many, |text| Meaning::Expression(text));
        assert_eq!((patterns.unread().count(), patterns.first("ax1023")), (2, Some(1)));
    }

    #[test]
    fn names_without_anything_special_are_found_however_many_there_are() {
        let many: Vec<String> = (0..50_000).map(|i| format!(r"^model\.layers\.{i}\.mlp$")).collect();
        let patterns = ModulePatterns::new(many, |text| Meaning::Expression(text));
        assert_eq!(patterns.unread().count(), 0);
        for i in (0..50_000).step_by(7) {
            assert_eq!(patterns.first(&format!("model.layers.{i}.mlp")), Some(i));
        }
    }

    #[test]
    fn parts_are_whole_parts_an_end_or_an_expression() {
        let texts = ["visual", "fc1", "layer.1", "mlp.*gate", ""].map(str::to_owned).to_vec();
        let patterns = ModulePatterns::new(texts, |text| Meaning::Parts(text));
        let cases = [
            ("model.visual.blocks.0", Some(0)),
            ("visualiser.blocks", None),
            ("model.layers.3.fc1", Some(1)),
            ("layer.1.attn", Some(2)),
            ("layer.11.attn", None),
            ("mlp.0.gate", Some(3)),
            ("mlp.0.gate_proj", None),
            ("a.layer.1.b", Some(2)),
            ("a.layer.1", Some(2)),
            ("ä.fc1", Some(1)),
            ("", None),
        ];
        for (name, expected) in cases {
            assert_eq!(patterns.first(name), expected, "{name}");
        }
    }
}
