use super::*;
use serde_json::json;
use std::error::Error;

fn template(text: &str) -> ChatTemplate {
    let templates = BTreeMap::from([(DEFAULT.to_owned(), text.to_owned())]);
    ChatTemplate::new(Path::new("chat_template.jinja"), templates, Map::new()).unwrap()
}

fn messages() -> Vec<Value> {
    vec![
        json!({"role": "user", "content": " Why? "}),
        json!({"role": "assistant", "content": "Because <b>."}),
    ]
}

fn columns(columns: Value) -> Map<String, Value> {
    columns.as_object().unwrap().clone()
}

fn render(text: &str, messages: &[Value], given: Value) -> Result<Rendered, TokenizerError> {
    template(text).render(Chat { messages, columns: &columns(given) }, &[])
}

fn text(text: &str, messages: &[Value], given: Value) -> String {
    render(text, messages, given).unwrap().text
}

fn shown(source: &str) -> String {
    text(source, &messages(), json!({}))
}

#[test]
fn a_conversation_is_written_turn_by_turn() {
    let chatml = template(
        "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message.content.strip() + '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    );
    let user = "<|im_start|>user\nWhy?<|im_end|>\n";
    let (messages, columns) = (messages(), Map::new());
    let rendered = chatml.render(Chat { messages: &messages, columns: &columns }, &[1]).unwrap();
    let answer = "<|im_start|>assistant\nBecause <b>.<|im_end|>\n";
    assert_eq!(rendered.text, format!("{user}{answer}"));
    let turns: Vec<_> = std::iter::once(user.len()..user.len() + answer.len()).collect();
    assert_eq!(rendered.turns, Some(turns));
    assert_eq!(rendered.generated, None);
    let prompt = chatml.prompt(Chat { messages: &messages[..1], columns: &columns }).unwrap().text;
    assert_eq!(prompt, format!("{user}<|im_start|>assistant\n"));
}

#[test]
fn what_templates_of_transformers_use_is_there() {
    let spaces = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}";
    assert_eq!(shown(spaces), "1");
    assert_eq!(
        shown("{{ messages[1]['content'].split(' ')[0] }}{{ messages[-1].role }}"),
        "Becauseassistant"
    );
    assert_eq!(
        shown("a {%- generation %} {{ messages[1].content }}{% endgeneration -%} b"),
        "a Because <b>.b"
    );
    assert_eq!(shown("{{ messages[1] | tojson }}"), r#"{"role": "assistant", "content": "Because <b>."}"#);
    assert_eq!(shown("{{ [1, []] | tojson(indent=2) }}"), "[\n  1,\n  []\n]");
    assert_eq!(shown("a\r\n{% if true %}\r\nb{% endif %}"), "a\nb");
}

/// Expected values are from jinja2 3.1.6 with the environment of Transformers 5.24.
#[test]
fn expressions_give_what_they_give_in_python() {
    for (source, expected) in [
        ("{{ 'a-b-c'.rsplit('-', 1) }}", "['a-b', 'c']"),
        ("{{ ' a  b c '.split(None, 1) }}{{ ' a b '.split() }}", "['a', 'b c ']['a', 'b']"),
        ("{{ 'a,b,c'.split(',', maxsplit=1) }}", "['a', 'b,c']"),
        ("{{ 'xay'.removeprefix('x').removesuffix('y') }}", "a"),
        ("{{ 'a=b=c'.partition('=')[2] }}{{ 'a=b=c'.rpartition('=')[0] }}", "b=ca=b"),
        ("{{ 'ab'.center(5, '*') }}{{ '7'.zfill(3) }}{{ 'a'.ljust(3) }}|", "**ab*007a  |"),
        ("{{ 'a\\nb\\r\\nc'.splitlines() }}", "['a', 'b', 'c']"),
        ("{{ '{} {name}'.format('a', name='b') }}{{ '%s-%d' | format('a', 3) }}", "a ba-3"),
        ("{{ 'abcdef'[::-1] }}{{ 'abcdef'[1:5:2] }}{{ messages[::-1][0].role }}", "fedcbabdassistant"),
        (
            "{{ none }}{{ true }}{{ 1.0 }}{{ [1, 'a', none] }}{{ {'a': [true]} }}",
            "NoneTrue1.0[1, 'a', None]{'a': [True]}",
        ),
        (
            "{{ messages[0].content is sequence }}{{ messages[0] is mapping }}{{ messages is iterable }}",
            "TrueTrueTrue",
        ),
        (
            "{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}",
            r#"{"a":"\u00e9","b":1}"#,
        ),
        ("{{ {'items': [1]}.items() | list }}", "[('items', [1])]"),
        ("{{ 'a' ~ 1 ~ [2] }}{{ '-' * 3 }}{{ 7 // 2 }}{{ 7 / 2 }}", "a1[2]---33.5"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user,assistant"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
    ] {
        assert_eq!(shown(source), expected, "{source}");
    }
}

#[test]
fn a_template_sees_what_transformers_gives_it() {
    let all = json!({
        "id": 3, "tools": "[{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": null}}]",
        "chat_template_kwargs": {"think": false, "unheard": 1}
    });
    let source = "{{ tools | tojson }}{{ documents is none }}{{ think }}{{ messages[0].content }}";
    let rendered = render(source, &messages(), all).unwrap();
    assert_eq!(rendered.text, r#"[{"name": "f", "arguments": {"b": 1, "a": null}}]TrueFalse Why? "#);
    assert_eq!(rendered.unused_columns, ["id", "chat_template_kwargs.unheard"]);
    assert_eq!(rendered.unused_fields, ["role"]);
    let documents = json!({"documents": [{"title": "t"}], "extra": "e"});
    assert_eq!(text("{{ documents[0].title }}{{ extra }}", &messages(), documents), "te");
}

#[test]
fn null_fields_are_dropped_and_reasoning_has_every_name() {
    let messages = [json!({"role": "assistant", "content": null, "thinking": "hm", "tool_calls": null})];
    let source = "{{ messages[0] | tojson }}{{ messages[0].content is defined }}";
    let expected = r#"{"thinking": "hm", "role": "assistant", "reasoning_content": "hm"}False"#;
    assert_eq!(text(source, &messages, json!({})), expected);
    let read =
        render("{{ messages[0].reasoning_content }}{{ messages[0].role }}", &messages, json!({})).unwrap();
    assert!(read.unused_fields.is_empty(), "{:?}", read.unused_fields);
}

#[test]
fn a_column_that_is_not_what_transformers_takes_is_refused() {
    for (given, named) in [
        (json!({"tools": ["f"]}), "`tools`"),
        (json!({"tools": "no JSON"}), "`tools`"),
        (json!({"documents": {}}), "`documents`"),
        (json!({"chat_template_kwargs": [1]}), "`chat_template_kwargs`"),
        (json!({"chat_template_kwargs": {"add_generation_prompt": true}}), "`add_generation_prompt`"),
    ] {
        let error = render("a", &messages(), given).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn tools_choose_their_template() {
    let several = |names: &[&str]| {
        let templates =
            names.iter().map(|name| ((*name).to_owned(), format!("{name}{{{{ tools is none }}}}")));
        ChatTemplate::new(Path::new("a.jinja"), templates.collect(), Map::new()).unwrap()
    };
    let messages = messages();
    let of = |template: &ChatTemplate, given| {
        template
            .render(Chat { messages: &messages, columns: &columns(given) }, &[])
            .map(|rendered| rendered.text)
    };
    let both = several(&["default", "tool_use", "rag"]);
    assert_eq!(of(&both, json!({})).unwrap(), "defaultTrue");
    assert_eq!(of(&both, json!({"tools": []})).unwrap(), "tool_useFalse");
    let error = of(&several(&["rag", "tool_use"]), json!({})).unwrap_err().to_string();
    assert!(error.contains("`rag`, `tool_use`") && error.contains("`default`"), "{error}");
}

#[test]
fn marks_are_places_in_the_text() {
    let source = "{% for m in messages %}é{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}";
    let rendered = render(source, &messages(), json!({})).unwrap();
    let marked: Vec<&str> =
        rendered.generated.unwrap().into_iter().map(|place| &rendered.text[place]).collect();
    assert_eq!(marked, [" Why? ", "Because <b>."]);
}

#[test]
fn turns_are_found_in_the_loop_that_writes_them() {
    // The loop before visits all messages backwards, the inner one looks ahead, and one message is skipped.
    let source = "{% for m in messages[::-1] %}{% endfor %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}<{{ m.role }}>{% for n in messages[loop.index:] %}{% endfor %}{{ m.content }};{% endfor %}!";
    let said: Vec<Value> = ["system", "user", "assistant", "user", "assistant"]
        .iter()
        .map(|role| json!({"role": role, "content": role}))
        .collect();
    let rendered = template(source).render(Chat { messages: &said, columns: &Map::new() }, &[2, 4]).unwrap();
    let turns: Vec<&str> = rendered.turns.unwrap().into_iter().map(|turn| &rendered.text[turn]).collect();
    assert_eq!(turns, ["<assistant>assistant;", "<assistant>assistant;!"]);
    let none =
        template("{{ messages[0].content }}").render(Chat { messages: &said, columns: &Map::new() }, &[2]);
    assert_eq!(none.unwrap().turns, None);
}

#[test]
fn what_a_template_says_against_a_conversation_is_told() {
    let error = render("{{ raise_exception('Only user turns!') }}", &messages(), json!({})).unwrap_err();
    let reason = error.source().unwrap().to_string();
    assert!(
        error.to_string().contains("chat_template.jinja") && reason.contains("Only user turns!"),
        "{reason}"
    );
}

#[test]
fn the_date_is_one_day() {
    let rendered = render("{{ strftime_now('%Y-%m-%d, %A %-d %B') }}", &messages(), json!({})).unwrap();
    assert_eq!((rendered.text.as_str(), rendered.dated), ("2024-07-26, Friday 26 July", true));
    assert!(!render("{{ strftime_now is defined }}", &messages(), json!({})).unwrap().dated);
    assert!(render("{{ strftime_now('%Q') }}", &messages(), json!({})).is_err());
}
