"""Chat completions through the real SDK, on a real port."""

import openai
from gateway_http_kit import running


def client(url: str, key: str = "none", **settings) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=10, **settings)


def test_an_answer_whole() -> None:
    with running("hello there") as (gateway, speaker):
        raw = client(gateway.url).chat.completions.with_raw_response.create(
            model="gpt-5", messages=[{"role": "user", "content": "hi"}]
        )
        answer = raw.parse()
        assert answer.choices[0].message.content == "hello there"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(speaker.asked[0].token_ids)
        assert raw.headers["x-headrace-policy-version"] == "3"
        assert len(raw.headers["x-headrace-rollout"]) == 32
