//! Schemas and the texts that keep to them.

use super::*;
use crate::bench::Random;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m")
}

fn grammars() -> (Grammars, Tokenizer) {
    let tokenizer = Tokenizer::from_folder(&folder()).unwrap();
    (Grammars::new(&tokenizer, &[0], 4096).unwrap(), tokenizer)
}

/// Schemas as clients have them, each with a text that keeps to it.
#[test]
fn ordinary_schemas_are_within_the_bounds() {
    let (grammars, tokenizer) = grammars();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata/schemas.json");
    let all: Vec<Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    for one in &all {
        let name = &one["name"];
        let made = grammars.of_schema(&one["schema"]).unwrap_or_else(|why| panic!("{name}: {why}"));
        let mut follows = made.constraint();
        for token in tokenizer.encode(one["text"].as_str().unwrap()).unwrap().into_iter().chain([0]) {
            let mut logits = vec![0.0; 4096];
            follows.mask(&mut logits).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(logits[token as usize], 0.0, "{name}: {:?} is refused", tokenizer.token(token));
            // Where nothing can follow, the text ends without a token.
            if follows.take(token).unwrap() {
                break;
            }
        }
    }
    assert!(all.len() >= 20);
}

/// References in a row, as many as may be, each within what `around` makes of it.
fn chain(levels: usize, around: impl Fn(Value) -> Value) -> Value {
    let name = |at: usize| format!("d{at}");
    let of = |at: usize| match at + 1 == levels {
        true => json!({"type": "boolean"}),
        false => around(json!({"$ref": format!("#/$defs/{}", name(at + 1))})),
    };
    let defs: serde_json::Map<String, Value> = (0..levels).map(|at| (name(at), of(at))).collect();
    json!({"$defs": defs, "$ref": "#/$defs/d0"})
}

/// The deepest and the widest schemas that [`schema::check`] lets through, on half of the stack.
#[test]
fn a_stack_holds_every_schema_that_is_let_through() {
    let object = |part: Value, required: bool| json!({"type": "object", "properties": {"a": part}, "required": if required { vec!["a"] } else { vec![] }, "additionalProperties": false});
    let wide = |from: usize, required: bool| {
        let names: Vec<String> = (0..schema::MOST_IN_PLACE).map(|at| format!("p{}", from + at)).collect();
        let properties: serde_json::Map<String, Value> =
            names.iter().map(|name| (name.clone(), json!({"type": "boolean"}))).collect();
        json!({"type": "object", "properties": properties, "required": if required { names } else { vec![] }, "additionalProperties": false})
    };
    let open = |mut schema: Value| {
        schema.as_object_mut().unwrap().remove("additionalProperties");
        schema
    };
    type Around = Box<dyn Fn(Value) -> Value>;
    let kinds: [(&str, Around); 8] = [
        ("references", Box::new(|part| part)),
        ("required", Box::new(move |part| object(part, true))),
        ("optional", Box::new(move |part| object(part, false))),
        ("arrays", Box::new(|part| json!({"type": "array", "items": part}))),
        ("tuples", Box::new(|part| json!({"type": "array", "prefixItems": [part], "minItems": 1}))),
        ("anyOf", Box::new(|part| json!({"anyOf": [part, {"type": "null"}]}))),
        ("allOf", Box::new(|part| json!({"allOf": [part, {"type": "boolean"}]}))),
        (
            "beside a type",
            Box::new(|mut part| {
                part["type"] = json!("boolean");
                part
            }),
        ),
    ];
    let mut all = Vec::new();
    for (name, around) in kinds {
        let deepest = (1..=schema::MOST_LEVELS).rev().map(|levels| chain(levels, &around));
        let deepest = deepest.into_iter().find(|schema| schema::check(schema).is_ok()).unwrap();
        all.push((name.to_owned(), deepest));
    }
    for required in [false, true] {
        all.push((format!("wide, required: {required}"), wide(0, required)));
        let step = schema::MOST_IN_PLACE;
        let parts: Vec<Value> = (0..schema::MOST_NAMES / step).map(|at| open(wide(at * step, required))).collect();
        all.push((format!("widest, required: {required}"), json!({"allOf": parts})));
    }
    let deep = "[".repeat(100) + &"]".repeat(100);
    all.push(("const".to_owned(), json!({"const": serde_json::from_str::<Value>(&deep).unwrap()})));
    all.push(("pattern".to_owned(), json!({"type": "string", "pattern": "a?".repeat(2048)})));
    all.push(("groups".to_owned(), json!({"type": "string", "pattern": "(".repeat(2000) + "a" + &")".repeat(2000)})));
    let (grammars, _) = grammars();
    for (name, schema) in all {
        schema::check(&schema).unwrap_or_else(|why| panic!("{name}: {why}"));
        std::thread::scope(|scope| {
            let begun = Instant::now();
            let grammars = &grammars;
            let make = move || {
                // What is refused for another reason is refused, not the end of the process.
                let Ok(made) = grammars.of_schema(&schema) else { return false };
                let mut follows = made.constraint();
                for _ in 0..8 {
                    let mut logits = vec![0.0; 4096];
                    if follows.mask(&mut logits).is_err() {
                        return false;
                    }
                    let token = logits.iter().rposition(|logit| *logit == 0.0).unwrap();
                    if follows.take(token as u32).unwrap() {
                        break;
                    }
                }
                true
            };
            let thread = std::thread::Builder::new().stack_size(STACK / 2).spawn_scoped(scope, make).unwrap();
            println!("{name}: served: {}, {:?}", thread.join().unwrap(), begun.elapsed());
        });
    }
}

#[test]
fn many_functions_are_one_grammar() {
    let (grammars, _) = grammars();
    let part = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/k"}}}, "additionalProperties": false});
    let function = |at: usize| {
        let mut parameters = part.clone();
        parameters["$defs"] = json!({"k": {"anyOf": [part, {"type": "null"}]}});
        Function { at, name: format!("f{at}"), parameters }
    };
    for form in [ToolForm::Hermes, ToolForm::Llama3] {
        let mut functions: Vec<Function> = (0..128).map(function).collect();
        let soon = Instant::now() + std::time::Duration::from_secs(600);
        grammars.compile(&Form::Call(form, functions.clone()), soon).unwrap();
        functions[100].parameters["properties"]["b"] = json!({"type": "thing"});
        let refused = grammars.compile(&Form::Call(form, functions), soon).unwrap_err();
        assert_eq!(refused.field, "tools[100].function.parameters");
    }
}

#[test]
fn what_costs_too_much_or_allows_nothing_is_refused_soon() {
    let (grammars, _) = grammars();
    let big = 10_i64.pow(18);
    for (schema, why) in [
        (json!({"type": "integer", "minimum": -big, "maximum": big, "multipleOf": 999_983}), "multipleOf"),
        (json!({"type": "integer", "multipleOf": 9973, "maximum": big}), "expressions"),
        (json!({"$ref": "#"}), "no text keeps to it"),
        (chain(800, |part| part), "levels"),
    ] {
        let begun = Instant::now();
        let refused = grammars.of_schema(&schema).unwrap_err();
        assert!(begun.elapsed().as_secs() < 60);
        assert!(refused.contains(why) && !refused.contains('<'), "{refused}");
    }
}

/// Whether a text keeps to a grammar.
fn keeps(made: &Compiled, tokenizer: &Tokenizer, text: &str) -> bool {
    let mut matcher = made.matcher.deep_clone();
    let tokens = tokenizer.encode(text).unwrap();
    matcher.consume_tokens(&tokens).is_ok() && matcher.is_accepting().unwrap()
}

/// A schema of numbers, and its bounds.
struct Numbers {
    schema: Value,
    /// `minimum`, `exclusiveMinimum`, `maximum`, `exclusiveMaximum`.
    bounds: [Option<f64>; 4],
    integer: bool,
}

impl Numbers {
    /// Bounds in one place, or in two that are joined.
    fn draw(random: &mut Random) -> Self {
        const NAMES: [&str; 4] = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"];
        const BOUNDS: [f64; 11] = [-10.5, -1.5, -1.0, -0.55, -0.05, 0.0, 0.05, 0.5, 1.0, 1.05, 2.0];
        let integer = random.below(4) == 0;
        let kind = if integer { "integer" } else { "number" };
        let mut parts = [json!({"type": kind}), json!({})];
        let mut bounds = [None; 4];
        for (name, bound) in NAMES.iter().zip(&mut bounds) {
            if random.below(2) == 0 {
                let drawn = BOUNDS[random.below(BOUNDS.len())];
                *bound = Some(drawn);
                let number = if drawn.fract() == 0.0 { json!(drawn as i64) } else { json!(drawn) };
                parts[random.below(2)][name] = number;
            }
        }
        let [first, second] = parts;
        let both = |mut one: Value, other: Value| {
            one.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
            one
        };
        let schema = match random.below(5) {
            0 => json!({"allOf": [first, second]}),
            1 => both(first, json!({"$ref": "#/$defs/a", "$defs": {"a": second}})),
            2 => both(first, json!({"anyOf": [second, {"type": "string"}]})),
            _ => both(first, second),
        };
        Self { schema, bounds, integer }
    }

    fn allow(&self, text: &str) -> bool {
        let number: f64 = text.parse().unwrap();
        let [least, above, most, below] = self.bounds;
        let kept = |bound: Option<f64>, keeps: fn(&f64, &f64) -> bool| bound.is_none_or(|bound| keeps(&number, &bound));
        kept(least, f64::ge)
            && kept(above, f64::gt)
            && kept(most, f64::le)
            && kept(below, f64::lt)
            && !(self.integer && text.contains('.'))
    }
}

/// Numbers that keep to the grammars of schemas are those within their bounds.
#[test]
fn numbers_keep_to_bounds_or_these_are_refused() {
    let (grammars, tokenizer) = grammars();
    let spellings = |n: i32| {
        let number = f64::from(n) / 20.0;
        [number.to_string(), format!("{number:.2}"), format!("{number:.3}")]
    };
    let all: Vec<[String; 3]> = (-44..=44).chain([-300, -211, -210, -209, 200]).map(spellings).collect();
    let mut random = Random::new(1);
    let (mut served, mut refused) = (0, 0);
    for _ in 0..500 {
        let numbers = Numbers::draw(&mut random);
        let schema = &numbers.schema;
        match grammars.of_schema(schema) {
            Ok(made) => {
                served += 1;
                for texts in &all {
                    let kept: Vec<&String> = texts.iter().filter(|text| keeps(&made, &tokenizer, text)).collect();
                    assert!(kept.iter().all(|text| numbers.allow(text)), "one of {kept:?} by {schema}");
                    // A number need not come in each of its spellings.
                    assert!(!numbers.allow(&texts[0]) || !kept.is_empty(), "no {} by {schema}", texts[0]);
                }
            }
            Err(why) if why.contains("cannot be kept to") => refused += 1,
            Err(why) => {
                assert!(!all.iter().any(|texts| numbers.allow(&texts[0])), "{why}: {schema}");
            }
        }
    }
    assert!(served > 200 && refused > 5, "{served} served, {refused} refused");
}

#[test]
fn exclusive_bounds_are_served_or_refused_by_name() {
    let (grammars, tokenizer) = grammars();
    let number = |bounds: Value| {
        let mut schema = json!({"type": "number"});
        schema.as_object_mut().unwrap().extend(bounds.as_object().unwrap().clone());
        schema
    };
    for (bounds, named) in [
        (json!({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}), "'exclusiveMinimum' 0"),
        (json!({"exclusiveMinimum": 1, "maximum": 1.5}), "'exclusiveMinimum' 1"),
        (json!({"minimum": -0.5, "exclusiveMaximum": 0}), "'exclusiveMaximum' 0"),
        (json!({"minimum": -2.5, "exclusiveMaximum": -2}), "'exclusiveMaximum' -2"),
        (json!({"minimum": 0, "exclusiveMinimum": true, "maximum": 0.5}), "'exclusiveMinimum' 0"),
        (json!({"exclusiveMinimum": true}), "'exclusiveMinimum' of true"),
        (json!({"maximum": 1, "allOf": [{"minimum": 0}], "exclusiveMaximum": true}), "'exclusiveMaximum' of true"),
    ] {
        let refused = grammars.of_schema(&number(bounds)).unwrap_err();
        assert!(refused.contains(named), "{refused}");
    }
    for (bounds, good, bad) in [
        (json!({"exclusiveMinimum": 0, "exclusiveMaximum": 1}), ["0.5", "0.01"], ["0", "1"]),
        (json!({"exclusiveMinimum": 0}), ["0.5", "7"], ["0", "-1"]),
        (json!({"exclusiveMaximum": 0}), ["-0.5", "-7"], ["0", "-0"]),
        (json!({"exclusiveMinimum": 0.25, "exclusiveMaximum": 0.5}), ["0.3", "0.26"], ["0.25", "0.5"]),
        (json!({"exclusiveMinimum": 0, "maximum": 1.5}), ["1", "1.5"], ["0", "1.6"]),
        (json!({"exclusiveMinimum": -1, "maximum": -0.5}), ["-0.5", "-0.9"], ["-1", "-0.4"]),
        (json!({"maximum": 1, "exclusiveMaximum": true}), ["0", "-3"], ["1", "2"]),
    ] {
        let made = grammars.of_schema(&number(bounds.clone())).unwrap();
        assert_eq!(good.map(|text| keeps(&made, &tokenizer, text)), [true; 2], "{bounds}");
        assert_eq!(bad.map(|text| keeps(&made, &tokenizer, text)), [false; 2], "{bounds}");
    }
    // Bounds that only meet where schemas are joined; those of several values may be what they like.
    let (above, below) = (number(json!({"exclusiveMinimum": 0})), number(json!({"maximum": 0.9})));
    let property = |name: &str, schema: &Value| json!({"type": "object", "properties": {name: schema}});
    let two = json!({"type": "object", "properties": {"a": above, "b": below}, "required": ["a"], "additionalProperties": false});
    assert!(keeps(&grammars.of_schema(&two).unwrap(), &tokenizer, "{\"a\": 7}"));
    for joined in [
        json!({"allOf": [above, below]}),
        json!({"allOf": [property("a", &above), property("a", &below)]}),
        json!({"properties": {"a": above}, "patternProperties": {"a": below}}),
        json!({"$ref": "#/$defs/a", "exclusiveMinimum": 0, "$defs": {"a": below}}),
        json!({"anyOf": [above, {"type": "null"}], "maximum": 0.9}),
    ] {
        let refused = grammars.of_schema(&joined).unwrap_err();
        assert!(refused.contains("'exclusiveMinimum' 0 cannot be kept to"), "{refused}: {joined}");
    }
}

#[test]
fn objects_have_as_many_names_as_they_must() {
    let (grammars, tokenizer) = grammars();
    let object = |least: usize, more: Value| {
        let mut schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "minProperties": least});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    for more in [
        json!({}),
        json!({"additionalProperties": {"type": "integer"}}),
        json!({"additionalProperties": false, "patternProperties": {"^b": true}}),
    ] {
        let refused = grammars.of_schema(&object(3, more.clone())).unwrap_err();
        assert!(refused.contains("'minProperties' 3") && refused.contains("up to 2"), "{refused}");
        let made = grammars.of_schema(&object(2, more.clone())).unwrap();
        for (text, kept) in [
            ("{\"a\": 1, \"b\": 2}", true),
            ("{\"a\": 1}", false),
            ("{\"a\": 1, \"a\": 2}", false),
            // The same name.
            ("{\"a\": 1, \"\\u0061\": 2}", false),
        ] {
            assert_eq!(keeps(&made, &tokenizer, text), kept, "{text} by {more}");
        }
    }
    // A name of the schema has its own values, whatever is written for it.
    let typed =
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}});
    let made = grammars.of_schema(&typed).unwrap();
    let written = |text: &str| keeps(&made, &tokenizer, text);
    assert!(!written("{\"\\u0061\": \"x\"}") && written("{\"b\\n\": \"é\\t\"}"));
    let choice = json!({"type": "object", "properties": {"a": true, "b": true}, "minProperties": 1, "additionalProperties": false});
    let made = grammars.of_schema(&choice).unwrap();
    assert!(keeps(&made, &tokenizer, "{\"b\": 2}") && !keeps(&made, &tokenizer, "{}"));
}

#[test]
fn what_is_not_served_is_told_in_words_of_clients() {
    let (grammars, _) = grammars();
    for (schema, why) in [
        (json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "'oneOf' is served only where its parts"),
        (json!({"type": "object", "properties": {"a": {"oneOf": [true, {"type": "null"}]}}}), "use 'anyOf'"),
        (json!({"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 3}), "draft-03"),
        (json!({"items": {"$schema": "http://json-schema.org/draft-02/schema#"}}), "draft-02"),
        (json!({"$schema": "http://json-schema.org/draft-01/schema"}), "draft-04 on"),
    ] {
        let refused = grammars.of_schema(&schema).unwrap_err();
        assert!(refused.contains(why) && !refused.contains("option"), "{refused}");
        let parameters = json!({"type": "object", "properties": {"a": schema}});
        let function = Function { at: 3, name: "f".to_owned(), parameters };
        let soon = Instant::now() + std::time::Duration::from_secs(600);
        let refused = grammars.compile(&Form::Call(ToolForm::Hermes, vec![function]), soon).unwrap_err();
        assert!(refused.field == "tools[3].function.parameters" && refused.why.contains(why), "{refused:?}");
    }
    grammars.of_schema(&json!({"oneOf": [{"type": "integer"}, {"type": "string"}]})).unwrap();
    grammars.of_schema(&json!({"$schema": "http://json-schema.org/draft-04/schema#", "type": "null"})).unwrap();
}
